"""The command: ``python -m benchmarks EXPERIMENT``, or ``list``, ``report`` and ``merge``."""

from .cli import main

if __name__ == "__main__":
    main()
