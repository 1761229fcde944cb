"""Run the command line with ``python -m cpkit.cli``."""

from cpkit.cli import main

main()
