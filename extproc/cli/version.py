"""`extproc version`: the version of this package and what it runs on."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command to the `extproc` parser."""
    parser = subparsers.add_parser("version", help="print the version", description=__doc__)
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print it; returns the exit status."""
    try:
        version = metadata.version("extproc")
    except metadata.PackageNotFoundError:
        version = "(run from a checkout that is not installed)"
    print(f"extproc {version}")
    print(f"python {platform.python_version()}, grpcio {metadata.version('grpcio')}")
    return 0
