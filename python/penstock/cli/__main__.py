"""``python -m penstock.cli`` is ``penstock``."""

from penstock.cli import main

main()
