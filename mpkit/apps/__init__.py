"""Commands and tools built on the rest: the command line, the demonstration, the explorer, mk.compare."""
