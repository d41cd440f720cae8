"""`python -m extproc`."""

from __future__ import annotations

import sys

from extproc.cli import main

if __name__ == "__main__":
    sys.exit(main.main())
