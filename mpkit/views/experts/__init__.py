"""The load of experts as a table and as a picture."""
