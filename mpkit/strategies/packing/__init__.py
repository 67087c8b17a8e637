"""Pickling of what ranks receive: objects, and the settings of the launching process."""
