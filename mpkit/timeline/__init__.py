"""A Timeline is a Trace put on a clock: its figures, causes of idleness, traffic; simulation."""
