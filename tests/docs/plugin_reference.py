"""The reference of plugins and of the plugin API, from the catalogue and from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from extproc import endpoint, request
from extproc.scheduling import framework, registry
from extproc.testing import builders, contract
from tests.docs import reference

ROOT = Path(__file__).parents[2]

#: Heading of a role to its plugins.
ROLES: Mapping[str, Mapping[str, type[Any]]] = {
    "Filters": registry.FILTERS,
    "Scorers": registry.SCORERS,
    "Costs": registry.COSTS,
    "Pickers": registry.PICKERS,
    "Deciders": registry.DECIDERS,
}

#: What a plugin reads, or is.
VALUES = (
    framework.SchedulingContext,
    endpoint.Candidate,
    endpoint.Endpoint,
    endpoint.Load,
    request.InferenceRequest,
)
PROTOCOLS = (framework.Filter, framework.Scorer, framework.CostModel, framework.Picker)
KIT = (contract, builders)


def strategies_block() -> str:
    """Plugins of each built-in strategy."""
    rows = ["| strategy | filters | scorers or costs, with weights | picker |", "|---|---|---|---|"]
    for name, profile in registry.profiles().items():
        filters = ", ".join(f"`{step.kind}`" for step in profile.filters) or "none"
        weighed = [f"`{scorer.kind}` {weight:g}" for scorer, weight in profile.scorers]
        if profile.cost is not None:
            weighed.append(f"`{profile.cost.kind}`")
        rows.append(
            f"| `{name}` | {filters} | {', '.join(weighed) or 'none'} | `{profile.picker.kind}` |"
        )
    return "\n".join(rows)


def plugins_block() -> str:
    """A table of the plugins of each role, then a part for each plugin."""
    parts: list[str] = []
    for role, table in ROLES.items():
        parts += [f"## {role}", "\n".join(_summary(table, role.removesuffix("s").lower()))]
        parts += [
            _detail(kind, plugin, role.removesuffix("s").lower())
            for kind, plugin in _own_kinds(table)
        ]
    return "\n\n".join(parts)


def _summary(table: Mapping[str, type[Any]], role: str) -> Iterator[str]:
    yield f"| {role} | alias | reads | what it does |"
    yield "|---|---|---|---|"
    for kind, plugin in _own_kinds(table):
        first = re.split(r"\n\n", _prose(plugin), maxsplit=1)[0]
        alias = ", ".join(f"`{name}`" for name in registry.aliases_of(kind))
        yield (
            f"| [`{kind}`](#{kind}-{role}) | {alias} | {_reads(plugin)} | {reference.cell(first)} |"
        )


def _own_kinds(table: Mapping[str, type[Any]]) -> list[tuple[str, type[Any]]]:
    """Classes by their own kinds, without aliases, sorted."""
    return sorted((kind, plugin) for kind, plugin in table.items() if kind not in registry.ALIASES)


def _detail(kind: str, plugin: type[Any], role: str) -> str:
    path = Path(inspect.getsourcefile(plugin) or "").relative_to(ROOT)
    lines = [
        f"### {kind} ({role})",
        reference.linked(_prose(plugin)),
        f"Reads: {_reads(plugin)}. Source: [`{path}`](../../{path}).",
    ]
    if msgspec.structs.fields(plugin):
        table = reference.table("", plugin).partition("\n\n")[2]
        lines.append(table.replace("| field |", "| parameter |", 1))
    return "\n\n".join(lines)


def _reads(plugin: type[Any]) -> str:
    needs = getattr(plugin, "needs", ())
    if not isinstance(needs, frozenset):
        return "as its parameters say"
    return ", ".join(sorted(signal.value.replace("_", " ") for signal in needs)) or "nothing"


def _prose(owner: object) -> str:
    text = inspect.getdoc(owner) or ""
    return re.split(r"\n\n(?:Attributes|Args|Returns|Raises):\n", text, maxsplit=1)[0]


def api_block() -> str:
    """Roles, the values that plugins read, signals and the kit for tests."""
    parts = ["## Roles"]
    for protocol in PROTOCOLS:
        parts += [f"### {protocol.__name__}", _prose(protocol), *_methods(protocol)]
    parts += [
        "## Signals",
        f"{_prose(framework.Signal)}",
        ", ".join(f"`{s.name}`" for s in framework.Signal) + ".",
    ]
    parts.append("## Values")
    for value in VALUES:
        rows = ["| field | meaning |", "|---|---|"]
        texts = reference.attributes(value)
        rows += [f"| `{name}` | {reference.cell(text)} |" for name, text in texts.items()]
        parts += [f"### {value.__name__}", _prose(value)]
        if texts:
            parts.append("\n".join(rows))
        parts += _methods(value)
    parts.append("## Kit for tests")
    for module in KIT:
        parts += [f"### `{module.__name__}`", _prose(module)]
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and function.__module__ == module.__name__:
                parts.append(_function(name, function))
    return "\n\n".join(parts)


def _methods(owner: type[Any]) -> list[str]:
    return [
        _function(name, member)
        for name, member in vars(owner).items()
        if not name.startswith("_") and inspect.isfunction(member) and member.__doc__
    ]


def _function(name: str, function: Any) -> str:
    arguments = ", ".join(name for name in inspect.signature(function).parameters if name != "self")
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return f"- `{name}({arguments})`: {text}"
