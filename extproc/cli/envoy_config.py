"""`extproc envoy-config`: list the shipped Envoy configurations, or print one.

extproc envoy-config override-host-eds > envoy.yaml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from extproc.cli import envoy_files


def add_parser(subparsers: Any) -> None:
    """Add the command to the `extproc` parser."""
    parser = subparsers.add_parser(
        "envoy-config",
        help="list the shipped Envoy configurations, or print one",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the configuration to print")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List or print; returns the exit status.

    Raises:
        ConfigError: No configuration has the name.
    """
    if args.name:
        path = envoy_files.find(args.name, where="NAME")
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    shipped = envoy_files.names()
    width = max(map(len, shipped), default=0)
    for name in shipped:
        print(f"{name:<{width}}  {_title(envoy_files.find(name, where='NAME'))}")
    return 0


def _title(path: Path) -> str:
    """The first line of a configuration, which is a comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").rstrip(".")
