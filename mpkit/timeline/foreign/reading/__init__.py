"""Files in Chrome's trace format, read as a stream, checked, mended, and put in columns."""
