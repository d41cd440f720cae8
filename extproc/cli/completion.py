"""`extproc completion`: print a script that completes commands and flags in a shell.

extproc completion bash > ~/.local/share/bash-completion/completions/extproc
extproc completion zsh > ~/.zfunc/_extproc
"""

from __future__ import annotations

import argparse
import importlib

from extproc import distribution
from extproc.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


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
