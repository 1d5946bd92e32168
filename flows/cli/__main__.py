"""`python -m flows.cli` is the command `enginehouse`."""

from flows.cli import main

main()
