"""Files in Chrome's trace format, read as a stream, checked, fixed, and put in columns."""
