"""`python -m mpkit`: see mpkit.apps.cli."""

from mpkit.apps.cli import main

main()
