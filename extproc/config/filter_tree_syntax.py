"""Converts filter trees to parameters of the filter `tree`.

A file of ours writes nodes; an EndpointPickerConfig has a `decision-tree-filter`, whose nodes refer to
plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from extproc.config import pool_sections, validation
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling import filter_tree
from extproc.scheduling.framework import Filter, UpstreamParameters

#: Most nodes of one tree. The largest known tree has 13; the bound is against aliases in a YAML
#: file that make a node its own successor.
MAX_NODES = 100

#: Builds a filter from an entry at a place.
BuildFilter = Callable[[pool_sections.PluginEntry, Place], Filter]


class _TreeNode(pool_sections.PluginEntry, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A filter, and what follows it: nodes again."""

    on_success: object = None
    on_failure: object = None
    on_either: object = None


def build_tree_params(
    params: Mapping[str, object], build: BuildFilter, place: Place
) -> dict[str, object]:
    """Return parameters of a tree with a filter in every node.

    Args:
        params: Parameters as written.

    Raises:
        ConfigError: A node cannot be read, its filter cannot be built, or there are more than
            `MAX_NODES` nodes.
    """
    built: dict[str, object] = dict(params)
    if "root" in built:
        built["root"] = _node(built["root"], build, iter(range(MAX_NODES)), place / "root")
    return built


def _node(
    written: object, build: BuildFilter, budget: Iterator[int], place: Place
) -> filter_tree.FilterTreeNode:
    if next(budget, None) is None:
        raise ConfigError(
            Place(place.file, place.path[:6]),
            wanted=f"a tree of at most {MAX_NODES} nodes",
            got="more",
            fix="see whether an alias makes a node its own successor",
        )
    node = validation.to_struct(written, _TreeNode, where=place)
    if node.kind == filter_tree.FilterTree.kind:
        raise ConfigError(
            place / "kind",
            wanted="a filter that is no tree",
            got=node.kind,
            fix="write its root here: a node is a tree already",
        )
    node_filter = build(node, place)
    built = {
        field: _node(successor, build, budget, place / field)
        for field in _UPSTREAM_KEYS
        if (successor := getattr(node, field)) is not None
    }
    return filter_tree.FilterTreeNode(filter=node_filter, **built)


#: Keys of successors in a tree of ours, and upstream's.
_UPSTREAM_KEYS = {
    "on_success": "nextOnSuccess",
    "on_failure": "nextOnFailure",
    "on_either": "nextOnSuccessOrFailure",
}

#: Depth of references and trees. The gateway's default has 4; the bound is against trees that
#: refer to each other in a circle.
MAX_DEPTH = 32

#: Finds the kind and parameters of a plugin by its name, referred to at a place; parameters of a
#: decision tree are as they were written.
FindPlugin = Callable[[str, Place], tuple[pool_sections.PluginEntry, bool]]


class _DecisionTreeEntry(UpstreamParameters, frozen=True, kw_only=True):
    """A plugin by name, or a tree; one of the two."""

    plugin_ref: validation.Name | None = None
    decision_tree: Mapping[str, object] | None = None


class _DecisionTreeNode(UpstreamParameters, frozen=True, kw_only=True):
    """A filter, and what follows it."""

    current: _DecisionTreeEntry
    next_on_success: _DecisionTreeEntry | None = None
    next_on_failure: _DecisionTreeEntry | None = None
    next_on_success_or_failure: _DecisionTreeEntry | None = None


def from_decision_tree(
    params: Mapping[str, object], find: FindPlugin, place: Place
) -> dict[str, object]:
    """Return parameters of a `tree` filter that behaves as a decision tree.

    Raises:
        ConfigError: A node cannot be read, a reference is unknown, or trees go in a circle.
    """
    return {"root": _decision_node(params, find, place, MAX_DEPTH)}


def _decision_node(
    params: Mapping[str, object], find: FindPlugin, place: Place, depth_left: int
) -> dict[str, object]:
    if not depth_left:
        raise ConfigError(
            Place(place.file, place.path[:4]),
            wanted=f"a decision tree of at most {MAX_DEPTH} levels",
            got="more",
            fix="see whether trees refer to each other in a circle",
        )
    node = validation.to_struct(params, _DecisionTreeNode, where=place)
    translated = _decision_entry(node.current, find, place / "current", depth_left)
    if translated.keys() - {"kind", "params"} or translated["kind"] == "tree":
        raise ConfigError(
            place / "current",
            wanted="a filter that is no tree",
            got="a decision tree",
            fix="name the filter that its root asks first",
        )
    successors = (node.next_on_success, node.next_on_failure, node.next_on_success_or_failure)
    for (field, key), entry in zip(_UPSTREAM_KEYS.items(), successors, strict=True):
        if entry is not None:
            translated[field] = _decision_entry(entry, find, place / key, depth_left)
    return translated


def _decision_entry(
    entry: _DecisionTreeEntry, find: FindPlugin, place: Place, depth_left: int
) -> dict[str, object]:
    if (entry.plugin_ref is None) == (entry.decision_tree is None):
        raise ConfigError(
            place,
            wanted="either pluginRef or decisionTree",
            got="both" if entry.plugin_ref else "neither",
            fix="name a plugin, or write a tree",
        )
    if entry.decision_tree is not None:
        return _decision_node(entry.decision_tree, find, place / "decisionTree", depth_left - 1)
    plugin, is_tree = find(entry.plugin_ref or "", place / "pluginRef")
    if is_tree:
        return _decision_node(plugin.params, find, place, depth_left - 1)
    return {"kind": plugin.kind, "params": plugin.params}
