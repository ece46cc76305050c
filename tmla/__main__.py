"""``python -m tmla``."""

import sys

from tmla.cli import main

if __name__ == "__main__":
    sys.exit(main())
