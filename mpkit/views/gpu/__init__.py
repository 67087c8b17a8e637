"""What the GPUs did while a run went on: curves for the tracks below a timeline, and lines of text."""
