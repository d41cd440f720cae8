"""`extproc version`: the version of this package and what it runs on."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

from extproc import distribution


def add_parser(subparsers: Any) -> None:
    """Add the command to the `extproc` parser."""
    parser = subparsers.add_parser("version", help="print the version", description=__doc__)
    parser.set_defaults(run=run)


def line() -> str:
    """The version in a line, which `extproc --version` prints."""
    version = distribution.installed_version()
    return f"extproc {version or '(run from a checkout that is not installed)'}"


def run(_: argparse.Namespace) -> int:
    """Print it; returns the exit status."""
    print(line())
    print(f"python {platform.python_version()}, grpcio {metadata.version('grpcio')}")
    return 0
