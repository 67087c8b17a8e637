"""`python -m mpkit`: see mpkit.cli."""

from mpkit.cli import main

main()
