"""What a rank of a check uses, and how long ranks may take."""
