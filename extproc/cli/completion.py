"""`extproc completion`: print a script that completes commands and flags in a shell.

extproc completion bash > ~/.local/share/bash-completion/completions/extproc
extproc completion zsh > ~/.zfunc/_extproc
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from extproc import distribution
from extproc.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add the command to the `extproc` parser."""
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script for a shell",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script; returns the exit status.

    Raises:
        ConfigError: shtab is not installed.
    """
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise ConfigError(
            "completion",
            wanted="the Python package shtab",
            got="it is not installed",
            fix=distribution.install_command("completion"),
        ) from None
    from extproc.cli import main

    print(shtab.complete(main.build_parser(main.COMMANDS), shell=args.shell))
    return 0
