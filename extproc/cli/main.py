"""`extproc`: one command line, a module for each command.

A command module has `add_parser(subparsers)` and `run(args) -> int`, and is imported only when it
is the one asked for. Exit status: 0 done, 1 failed while running, 2 wrong flags or configuration;
further ones are those of a command.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from extproc.errors import ConfigError, ExtprocError

#: Command to module and the line in --help.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("extproc.cli.serve", "run the endpoint picker"),
    "engine": ("extproc.cli.engine", "run one simulated vLLM engine"),
    "demo": ("extproc.cli.demo", "run Envoy, extproc and four simulated engines on loopback"),
    "demo-scale": (
        "extproc.cli.demo_scale",
        "run Envoy and extproc, and engines from zero and back",
    ),
    "check": ("extproc.cli.check", "read a configuration and say what it means"),
    "explain": ("extproc.cli.explain", "say which endpoint a request would get, and why"),
    "simulate": ("extproc.cli.simulate", "compare strategies on a simulated fleet"),
    "envoy-config": (
        "extproc.cli.envoy_config",
        "list the shipped Envoy configurations, or print one",
    ),
    "plugin": ("extproc.cli.plugin", "print a plugin template, or test a plugin file"),
    "version": ("extproc.cli.version", "print the version"),
}


class Command(Protocol):
    """What a command module is."""

    def add_parser(self, subparsers: Any) -> None:
        """Add the command and its flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: Words after the program's name; those of the process when None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # The word in front: what follows may be the value of a flag that is called like a command.
    name = words[0] if words and words[0] in COMMANDS else ""
    try:
        return _run(name, words)
    except ConfigError as error:
        print(f"extproc: {error}", file=sys.stderr)
        return 2
    except ExtprocError as error:
        print(f"extproc: {error}", file=sys.stderr)
        return 1
    except SystemExit as leaving:  # argparse: 0 after --help, 2 after a usage error
        return leaving.code if isinstance(leaving.code, int) else 2
    except KeyboardInterrupt:
        return 130


def _run(name: str, words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="extproc",
        description="An Envoy external-processing server that picks the LLM engine for every "
        "request.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    command: Command | None = None
    for other, (module, summary) in COMMANDS.items():
        if other == name:
            command = cast("Command", importlib.import_module(module))
            command.add_parser(subparsers)
        else:
            subparsers.add_parser(other, help=summary)
    args, unknown = parser.parse_known_args(words)
    if command is None:
        parser.error("the command comes first: extproc COMMAND [flags]")
    if unknown and not hasattr(args, "unknown_flags"):
        parser.error(f"unrecognised arguments: {' '.join(unknown)}")
    args.unknown_flags = unknown
    return command.run(args)
