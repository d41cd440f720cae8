"""`extproc completion`: print a script that completes commands and flags in a shell.

extproc completion bash > ~/.local/share/bash-completion/completions/extproc
extproc completion zsh > ~/.zfunc/_extproc
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from extproc import distribution
from extproc.errors import ConfigError

#: Kinds of completion of shtab, by the last word of what stands for a value in the help.
_COMPLETED: Final[Mapping[str, str]] = {
    "FILE": "FILE",
    "FOLDER": "DIRECTORY",
    "SCENARIO": "FILE",
}


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
            got="none",
            fix=distribution.install_command("completion"),
        ) from None
    from extproc.cli import main

    parser = main.build_parser(main.COMMANDS)
    words = _list_words()
    for action in _find_actions(parser):
        kind = _COMPLETED.get(str(action.metavar).rpartition("|")[2])
        if kind:
            setattr(action, "complete", getattr(shtab, kind))  # noqa: B010 - where shtab looks for it
        name = action.option_strings[0].lstrip("-") if action.option_strings else action.dest
        if words.get(name):
            setattr(action, "choices", words[name])  # noqa: B010 - the script offers them
        if action.option_strings and action.nargs == "?":
            # zsh would demand the value.
            setattr(action, "nargs", 0)  # noqa: B010 - the parser does nothing but be printed
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _list_words() -> Mapping[str, Sequence[str]]:
    """List the words that flags and arguments take, by name; a name means the same in all commands."""
    from extproc.cli import envoy_config, flag_table

    # By name, as all commands are imported: the picker does without the simulator.
    profiles = importlib.import_module("extproc.simulator.profiles")
    return {
        **{flag.name: flag_table.choices(flag) for flag in flag_table.FLAGS},
        "profile": sorted(profiles.PROFILES),
        "name": envoy_config.names(),
    }


def _find_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Flags and arguments of a command line, and of all its commands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _find_actions(command)
        else:
            yield action
