"""`python -m gristmill` is the program `gristmill`."""

from gristmill._program import main

main()
