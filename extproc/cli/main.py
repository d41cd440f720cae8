"""`extproc`: one command line, a module for each command.

A command module has `add_flags(parser)` and `run(args) -> int`; its docstring is the description in
--help. It is imported only when its command runs. Exit status: 0 done, 1 failed while running, 2 wrong flags or configuration;
further ones are those of a command.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import math
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from typing import Any, Protocol, TextIO, cast

from extproc import distribution
from extproc.errors import ConfigError, ExtprocError

#: Command to module and the line in --help.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("extproc.cli.serve", "run the endpoint picker"),
    "engine": ("extproc.simulator.engine_command", "run one simulated vLLM engine"),
    "demo": ("extproc.demo.demo", "run Envoy, extproc and four simulated engines on loopback"),
    "demo-scale": (
        "extproc.demo.demo_scale",
        "run Envoy and extproc, and engines from zero and back",
    ),
    "check": ("extproc.cli.check", "read a configuration and say what it means"),
    "doctor": (
        "extproc.cli.doctor",
        "look at a running Envoy, extproc and engines, and say what is wrong",
    ),
    "explain": ("extproc.cli.explain", "say which endpoint a request would get, and why"),
    "record": ("extproc.cli.record", "write the decisions of a running server to a file"),
    "replay": (
        "extproc.simulator.replay_command",
        "compare strategies on recorded requests",
    ),
    "tune": (
        "extproc.simulator.tune_command",
        "search for better numbers of a strategy on recorded requests",
    ),
    "plan": (
        "extproc.simulator.plan_command",
        "find the smallest fleet that meets objectives on recorded requests",
    ),
    "simulate": ("extproc.simulator.simulate_command", "compare strategies on a simulated fleet"),
    "envoy-config": (
        "extproc.cli.envoy_config",
        "list the shipped Envoy configurations, or print one",
    ),
    "plugin": ("extproc.cli.plugin", "print a plugin template, or test a plugin file"),
    "completion": ("extproc.cli.completion", "print a completion script for a shell"),
    "version": ("extproc.cli.main", "print the version"),
}


_EXAMPLES = """\
examples:
  extproc demo                                    try it on this machine
  extproc serve --endpoints 10.0.0.1:8000,10.0.0.2:8000
  extproc check extproc.yaml                      what a configuration means
  extproc explain --last                          why the last request went where it did

`extproc COMMAND --help` shows the flags of a command."""

#: Highest standard descriptor, that of standard error.
_STDERR = 2

#: Exit status of a program whose reader is gone, as shells report it.
_BROKEN_PIPE = 141

#: Error numbers of a file that takes no more.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Command(Protocol):
    """Interface of a command module."""

    __doc__: str | None

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the command."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: Words after the program's name; those of the process when None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    for output in (sys.stdout, sys.stderr):
        if isinstance(
            output, io.TextIOWrapper
        ):  # names may have characters that its encoding has not
            output.reconfigure(errors="backslashreplace")
    try:
        status = _run_reporting(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return _BROKEN_PIPE
    except OSError as error:
        if not _is_of_output(error):
            raise
        _drop_output()
        print_error(
            ExtprocError(
                wanted="an output that is open, and has room",
                got=error.strerror or str(error),
                fix="write to another file",
            )
        )
        return 1
    return status


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that the caller closed.

    Sockets would get the free descriptors, and libuv aborts where it has to close one of these.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115 - to the end of the process
    if sys.stderr is None:
        sys.stderr = open(_STDERR, "w", encoding="utf-8")  # noqa: SIM115 - the same


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Describe `extproc version`, the command of this module; it has no flags."""
    parser.description = None


def run(_: argparse.Namespace) -> int:
    """Print the version of this package and what it runs on; returns the exit status."""
    print(version_line())
    print(f"python {platform.python_version()}, grpcio {metadata.version('grpcio')}")
    return 0


def version_line() -> str:
    """The version in a line."""
    version = distribution.installed_version()
    return f"extproc {version or '(run from a checkout that is not installed)'}"


def print_error(error: ExtprocError) -> None:
    """Show an error on standard error: a line, and one for each of its notes.

    Others may have written a part of them.
    """
    first, *notes = (to_printable(line) for line in (str(error), *getattr(error, "__notes__", ())))
    print("\n".join([f"{paint('extproc:', 'red', sys.stderr)} {first}", *notes]), file=sys.stderr)


def to_printable(text: str) -> str:
    """Text with blanks for control characters and line ends, for a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def seconds_parser(least_s: float, most_s: float) -> Callable[[str], float]:
    """Build the type of a flag that takes seconds within bounds."""

    def parse(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not least_s <= seconds <= most_s:
            raise argparse.ArgumentTypeError(
                f"expected seconds from {least_s:g} to {most_s:g}, got {text!r}"
            )
        return seconds

    return parse


def read_number(text: str) -> int:
    """Read the number of a flag: digits only, 18 at most."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"expected a number such as 17, got {text!r}")
    return int(text)


def build_parser(commands: Collection[str]) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        commands: Commands whose flags are needed; of the others only the name is known.
    """
    parser = _Parser(
        prog="extproc",
        description="An Envoy external-processing server that picks the LLM engine for every "
        "request.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command_parser = subparsers.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name in commands:
            command = cast("Command", importlib.import_module(module))
            command_parser.description = command.__doc__
            command.add_flags(command_parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose --help fails where it cannot be written; that of argparse is silent."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is not None:
            file.write(message)


def _is_of_output(error: OSError) -> bool:
    """True for an error of standard output, which keeps what it could not write if it is buffered."""
    if error.errno in _FULL:
        return True
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Write no more: Python flushes once more at its end, which would fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_reporting(words: Sequence[str]) -> int:
    """Run a command line; returns the exit status, and shows the error there is."""
    try:
        return _run(words)
    except ConfigError as error:
        print_error(error)
        return 2
    except ExtprocError as error:
        print_error(error)
        return 1
    except SystemExit as leaving:  # argparse: 0 after --help, 2 after a usage error
        return leaving.code if isinstance(leaving.code, int) else 2
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:
    # The word in front: what follows may be the value of a flag that is called like a command.
    name = words[0] if words and words[0] in COMMANDS else ""
    if words == ["--version"]:
        print(version_line())
        return 0
    if words and not name and not words[0].startswith("-"):
        raise _unknown_command_error(words[0])
    if name == "serve":
        _install_start_handlers()
    parser = build_parser([name])
    args, unknown = parser.parse_known_args(words)
    if not name:
        parser.error("the command comes first: extproc COMMAND [flags]")
    if unknown and not hasattr(args, "unknown_flags"):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.unknown_flags = unknown
    command = cast("Command", importlib.import_module(COMMANDS[name][0]))
    return command.run(args)


def _install_start_handlers() -> None:
    """Install the signal handlers of a server that starts; those of its event loop replace them.

    Without a handler, process 1 of a container ignores SIGTERM, and SIGHUP ends any other process.
    Imports are most of a start, so this comes before those of the command.
    """
    # An exception would reach plugin files that are loaded, and nothing is open yet.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    # The configuration is about to be read; children would inherit SIG_IGN.
    signal.signal(signal.SIGHUP, lambda *_: None)


def _unknown_command_error(word: str) -> ConfigError:
    suggestion = difflib.get_close_matches(word, COMMANDS, n=1)
    return ConfigError(
        repr(word),
        wanted=f"a command: {', '.join(COMMANDS)}",
        got="none of them",
        fix=f"did you mean {suggestion[0]}?" if suggestion else "see extproc --help",
    )


_CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}


def paint(text: str, style: str, stream: TextIO) -> str:
    """Text in a style, `red`, `green`, `yellow` or `bold`, if the stream shows any."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not stream.isatty():
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
