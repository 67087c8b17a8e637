"""Gathering evidence: commands, files, this process, and short measurements on ranks. Nothing here judges."""
