"""Converts all forms of filter trees to parameters of the filter `tree`.

A file of ours writes nodes with our keys or with those of the first gateway; an
EndpointPickerConfig has a `decision-tree-filter`, whose nodes refer to plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from extproc.config import pool_sections, validation
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling import filter_tree
from extproc.scheduling.framework import Filter, UpstreamParameters

#: Most nodes of one tree. The largest known tree has 13; the bound is against aliases in a YAML
#: file that make a node its own successor.
MAX_NODES = 100

#: Filter names of the first gateway (docs/spec/prior-systems.md#single-strategies) and our kinds.
KINDS: Mapping[str, str] = {
    "affinity_lora": "adapter-active",
    "can_accept_new_lora": "can-accept-adapter",
    "critical_request": "critical-request",
    "drop_request": "drop-request",
    "least_kv_cache": "kv-range",
    "least_queuing": "queue-range",
    "low_cost_lora": "low-cost-adapter",
    "low_latency": "low-latency",
    "sheddable_request": "sheddable-capacity",
    "top_k": "top-k",
}

#: Its filter options and values that are called otherwise here.
_OPTIONS: Mapping[str, str] = {"topK": "k", "topKBy": "by"}
_VALUES: Mapping[object, str] = {
    "waiting_queue_size": "waiting",
    "kv_cache_usage_percent": "kv_usage",
}

#: Builds a filter from an entry at a place.
BuildFilter = Callable[[pool_sections.PluginEntry, Place], Filter]


class _TreeNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node in this project's spelling; successors are nodes again."""

    kind: validation.Name
    params: Mapping[str, object] = {}
    on_success: object = None
    on_failure: object = None
    on_either: object = None


class _GatewayNode(UpstreamParameters, frozen=True, kw_only=True):
    """A node in the first gateway's spelling."""

    name: validation.Name
    filter_option: Mapping[str, object] | None = None
    next_on_success: object = None
    next_on_failure: object = None
    next_on_success_or_failure: object = None


def build_tree_params(
    params: Mapping[str, object], build: BuildFilter, place: Place
) -> dict[str, object]:
    """Return parameters of a tree with a filter in every node.

    Args:
        params: Parameters as written: `root`, or the root node itself, as in files of the first
            gateway.

    Raises:
        ConfigError: A node cannot be read, its filter cannot be built, or there are more than
            `MAX_NODES` nodes.
    """
    budget = iter(range(MAX_NODES))
    if "root" not in params and ("kind" in params or "name" in params):
        return {"root": _node(params, build, budget, place)}
    built: dict[str, object] = dict(params)
    if "root" in built:
        built["root"] = _node(built["root"], build, budget, place / "root")
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
    is_gateway = isinstance(written, dict) and "name" in written
    read = _read_gateway_node if is_gateway else _read_tree_node
    entry, keys, successors = read(written, place)
    if entry.kind == filter_tree.FilterTree.kind:
        raise ConfigError(
            place / "kind",
            wanted="a filter that is no tree",
            got=entry.kind,
            fix="write its root here: a node is a tree already",
        )
    node_filter = build(entry, place)
    built = {
        field: _node(node, build, budget, place / key)
        for (field, key), node in zip(keys.items(), successors, strict=True)
        if node is not None
    }
    return filter_tree.FilterTreeNode(filter=node_filter, **built)


#: The keys of successors in a tree of ours, and in the first gateway's and upstream's.
_SUCCESSORS = ("on_success", "on_failure", "on_either")
_GATEWAY_KEYS = {
    "on_success": "nextOnSuccess",
    "on_failure": "nextOnFailure",
    "on_either": "nextOnSuccessOrFailure",
}

#: The entry of a node's filter, the key of each successor by its field, and the successors.
_ReadNode = tuple[pool_sections.PluginEntry, Mapping[str, str], tuple[object, object, object]]


def _read_tree_node(written: object, place: Place) -> _ReadNode:
    node = validation.to_struct(written, _TreeNode, where=place)
    entry = pool_sections.PluginEntry(kind=node.kind, params=node.params)
    keys = {field: field for field in _SUCCESSORS}
    return entry, keys, (node.on_success, node.on_failure, node.on_either)


def _read_gateway_node(written: object, place: Place) -> _ReadNode:
    node = validation.to_struct(written, _GatewayNode, where=place)
    options = {
        _OPTIONS.get(name, name): _VALUES.get(value, value) if isinstance(value, str) else value
        for name, value in (node.filter_option or {}).items()
    }
    return (
        pool_sections.PluginEntry(kind=KINDS.get(node.name, node.name), params=options),
        _GATEWAY_KEYS,
        (node.next_on_success, node.next_on_failure, node.next_on_success_or_failure),
    )


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
    for (field, key), entry in zip(_GATEWAY_KEYS.items(), successors, strict=True):
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
