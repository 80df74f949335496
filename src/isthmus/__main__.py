"""The program: `isthmus`, or `python -m isthmus`."""

import sys

from isthmus.signals import heed_signals


def main() -> None:
    """Heed signals first thing, then import what takes time, and run."""
    try:
        heed_signals()
        from isthmus.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
