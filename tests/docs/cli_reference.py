"""The reference of the command line, from the parsers of its commands."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from extproc.cli import flag_table, main
from tests.docs import reference


def block() -> str:
    """All commands with their flags."""
    parts = ["\n".join(_commands())]
    of_serve = set(_groups(_parser("serve")))
    for name, (_, summary) in main.COMMANDS.items():
        parser = _parser(name)
        parts += [f"## {name}", (parser.description or f"`extproc {name}`: {summary}.").strip()]
        groups = list(_groups(parser))
        own = [group for group in groups if name == "serve" or group not in of_serve]
        parts += itertools.chain.from_iterable(own)
        if len(own) < len(groups):
            parts.append("It takes the flags of [`serve`](#serve) as well.")
    parts += ["## Flags of the upstream picker", "\n".join(_upstream())]
    return "\n\n".join(parts)


def _commands() -> Iterator[str]:
    yield "| command | what it does |"
    yield "|---|---|"
    for name, (_, summary) in main.COMMANDS.items():
        yield f"| [`extproc {name}`](#{name}) | {summary} |"


def _upstream() -> Iterator[str]:
    yield "Accepted by `serve` and `check`, so that the arguments of a Deployment need no change."
    yield ""
    yield "| flag | values without effect | any other value | why, or what to use instead |"
    yield "|---|---|---|---|"
    for flag in flag_table.COMPATIBLE_FLAGS:
        values = ", ".join(
            f"`{value}`" if value else "empty" for value in sorted(flag.accepted_values)
        )
        effect = "is refused" if flag.refused else "gives a warning"
        yield f"| `--{flag.name}` | {values or 'none'} | {effect} | {reference.cell(flag.message)} |"


def _parser(name: str) -> argparse.ArgumentParser:
    actions = main.build_parser([name])._actions
    commands = next(a for a in actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[name]


def _groups(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Title and table of each group of flags."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if _is_shown(action)]
        rows = [
            _row(action) for action in actions if not isinstance(action, argparse._SubParsersAction)
        ]
        if rows:
            table = ["| flag | value | default | meaning |", "|---|---|---|---|", *rows]
            yield f"**{prefix}{group.title or 'flags'}**", "\n".join(table)
        for action in actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, below in action.choices.items():
                    yield from _groups(below, f"{name}: ")


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def _row(action: argparse.Action) -> str:
    flag = (
        ", ".join(f"`{name}`" for name in action.option_strings)
        or f"`{action.metavar or action.dest}`"
    )
    value = ""
    if action.option_strings and action.nargs != 0:
        named = action.metavar or (
            ",".join(map(str, action.choices)) if action.choices else action.dest.upper()
        )
        value = f"`{named}`" if isinstance(named, str) else f"`{' '.join(named)}`"
    default, text = action.default, action.help or ""
    # A default in words may differ from machine to machine.
    is_unset = default is None or default is False or default in (argparse.SUPPRESS, (), [], "")
    is_shown = not is_unset and "default:" not in text
    shown = f"`{default}`" if is_shown else ""
    text = text.replace(" (%(default)s)", "").replace("%%", "%")
    return f"| {flag} | {value.replace('|', chr(92) + '|')} | {shown} | {reference.cell(text)} |"
