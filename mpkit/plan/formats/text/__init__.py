"""Values in texts that other programs read: shell scripts and Python modules, of which nothing is run."""
