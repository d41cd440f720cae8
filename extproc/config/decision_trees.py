"""Converts the gateway's `decision-tree-filter` to our `tree` filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from extproc.config import constraints, scheduling_schema, validation
from extproc.errors import ConfigError

#: Depth of references and trees. The gateway's default has 4; the bound is against trees that
#: refer to each other in a circle.
DEEPEST = 32

#: Finds the kind and parameters of a plugin by its name, which stands at a path; parameters of a
#: decision tree are as they were written.
FindPlugin = Callable[[str, validation.Path], tuple[scheduling_schema.PluginEntry, bool]]

_WAYS = {
    "on_success": "nextOnSuccess",
    "on_failure": "nextOnFailure",
    "on_either": "nextOnSuccessOrFailure",
}


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """A plugin by name, or a tree; one of the two."""

    plugin_ref: constraints.Name | None = None
    decision_tree: Mapping[str, object] | None = None


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """A filter, and what follows it."""

    current: _Entry
    next_on_success: _Entry | None = None
    next_on_failure: _Entry | None = None
    next_on_success_or_failure: _Entry | None = None


def from_decision_tree(
    params: Mapping[str, object], find: FindPlugin, *, where: str, path: validation.Path
) -> dict[str, object]:
    """Return parameters of a `tree` filter that behaves as a decision tree.

    Args:
        params: Parameters of the decision tree, as written.
        find: Looks plugins up.
        where: The file, for errors.
        path: Where `params` stands in it, for errors.

    Raises:
        ConfigError: A node cannot be read, a reference is unknown, or trees go in a circle.
    """
    return {"root": _node(params, find, where=where, path=path, left=DEEPEST)}


def _node(
    params: Mapping[str, object], find: FindPlugin, *, where: str, path: validation.Path, left: int
) -> dict[str, object]:
    if not left:
        raise ConfigError(
            validation.location(where, path[:4]),
            wanted=f"a decision tree of at most {DEEPEST} levels",
            got="more",
            fix="see whether trees refer to each other in a circle",
        )
    node = validation.to_struct(params, _Node, where=where, path=path)
    translated = _entry(node.current, find, where=where, path=(*path, "current"), left=left)
    if translated.keys() - {"kind", "params"} or translated["kind"] == "tree":
        raise ConfigError(
            validation.location(where, (*path, "current")),
            wanted="a filter that is no tree",
            got="a decision tree",
            fix="name the filter that its root asks first",
        )
    below = {
        "on_success": node.next_on_success,
        "on_failure": node.next_on_failure,
        "on_either": node.next_on_success_or_failure,
    }
    for way, entry in below.items():
        if entry is not None:
            spot = (*path, _WAYS[way])
            translated[way] = _entry(entry, find, where=where, path=spot, left=left)
    return translated


def _entry(
    entry: _Entry, find: FindPlugin, *, where: str, path: validation.Path, left: int
) -> dict[str, object]:
    if (entry.plugin_ref is None) == (entry.decision_tree is None):
        raise ConfigError(
            validation.location(where, path),
            wanted="either pluginRef or decisionTree",
            got="both" if entry.plugin_ref else "neither",
            fix="name a plugin, or write a tree",
        )
    if entry.decision_tree is not None:
        spot = (*path, "decisionTree")
        return _node(entry.decision_tree, find, where=where, path=spot, left=left - 1)
    plugin, is_tree = find(entry.plugin_ref or "", (*path, "pluginRef"))
    if is_tree:
        return _node(plugin.params, find, where=where, path=path, left=left - 1)
    return {"kind": plugin.kind, "params": plugin.params}
