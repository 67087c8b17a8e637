"""Reports of the doctor: text, a table of the terminal, HTML."""
