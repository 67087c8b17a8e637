"""Devices, the links between them, and what operations cost there."""
