"""``python -m cpkit.cli`` is ``cpkit``."""

from cpkit.cli import main

main()
