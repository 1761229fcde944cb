"""Run the command line with ``python -m cpkit``."""

from cpkit.cli import main

main()
