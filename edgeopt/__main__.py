"""`python -m edgeopt`."""

from edgeopt.cli import main

main()
