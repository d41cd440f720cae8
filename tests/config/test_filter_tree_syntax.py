"""Filter trees from configuration files."""

import re
from pathlib import Path

import pytest

from extproc.config import loader, pool_sections, profile_builder
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.scheduling.plugin_guard import GuardedPlugin, GuardFactory, PluginCounters

OWN = """
from __future__ import annotations
from typing import ClassVar
import msgspec
from extproc.scheduling.framework import Signal

class Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: ClassVar[str] = "own"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def filter(self, turn, candidates):
        return candidates
"""


def resolve(params, **more):
    """The one filter of a profile with a tree of these parameters."""
    keep = pool_sections.PluginEntry(kind="tree", params=params)
    scheduling = pool_sections.SchedulingSection(
        profile=pool_sections.ProfileEntry(filters=(keep,)),
        plugin_files=tuple(more.pop("plugin_files", ())),
    )
    settings = Settings(scheduling=scheduling)
    profiles = profile_builder.resolve_all(settings, where="extproc.yaml", **more)
    return profiles.profile.filters[0]


def refused(params):
    with pytest.raises(ConfigError) as raised:
        resolve(params)
    return str(raised.value)


def kinds(node):
    """A tree as nested lists of its kinds: own, success, failure, either."""
    if node is None:
        return None
    below = [kinds(child) for child in (node.on_success, node.on_failure, node.on_either)]
    return [node.filter.kind, *below] if any(below) else node.filter.kind


def test_nodes_become_filters_with_their_successors():
    """Each node is the filter of its kind and parameters, and leads to the nodes below it."""
    tree = resolve(
        {
            "root": {
                "kind": "low-latency",
                "on_success": {"kind": "adapter-active", "on_either": {"kind": "queue-range"}},
                "on_failure": {"kind": "top-k", "params": {"k": 2, "by": "kv_usage"}},
            }
        }
    )
    assert kinds(tree.root) == [
        "low-latency",
        ["adapter-active", None, None, "queue-range"],
        "top-k",
        None,
    ]
    top = tree.root.on_failure.filter
    assert (top.k, top.by) == (2, "kv_usage")


def test_an_external_plugin_in_a_node_is_guarded(tmp_path):
    """A tree is no way around the time budget."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    tree = resolve(
        {"root": {"kind": "kv-range", "on_success": {"kind": "own"}}},
        plugin_files=[str(path)],
        guards=GuardFactory(stopwatch=lambda: 0.0, counts=PluginCounters()),
    )
    assert isinstance(tree.root.on_success.filter, GuardedPlugin)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, "expected the key root"),
        ({"root": "low-latency"}, "params.root"),
        ({"root": {"kind": "low-latncy"}}, "did you mean low-latency"),
        ({"root": {"kind": "kv-range", "on_sucess": {"kind": "kv-range"}}}, "on_success"),
        (
            {"root": {"kind": "kv-range", "on_failure": {"kind": "top-k", "params": {"k": 0}}}},
            "filters[0].params.root.on_failure.params.k",
        ),
        ({"root": {"kind": "kv-range", "on_failure": {"kind": "drop"}}}, "on_failure.kind"),
        ({"root": {"kind": "tree"}}, "a filter that is no tree"),
        ({"root": {"kind": "kv-range"}, "rot": 1}, "unknown key rot"),
    ],
)
def test_an_invalid_node_is_an_error_with_its_path(params, expected):
    """A misspelt key, kind or value names the node it stands in."""
    message = refused(params)
    assert expected in message
    assert message.startswith("extproc.yaml: scheduling.profile.filters[0].params")


def test_a_node_that_is_its_own_successor_is_an_error():
    """An alias in YAML can write an endless tree."""
    node = {"kind": "kv-range"}
    node["on_success"] = node
    assert "at most 100 nodes" in refused({"root": node})


def test_the_documented_tree_is_valid():
    """The tree that the page of scheduling shows loads, alias and all, and is written back in short."""
    page = (Path(__file__).parents[2] / "docs/concepts/scheduling.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    text = next(block for block in blocks if "kind: tree" in block)
    settings = loader.settings(loader.parse(text, where="scheduling.md"))
    tree = profile_builder.build_profile(settings, where="scheduling.md").filters[0]
    assert repr(tree.root) == (
        "adapter-active (yes queue-range (then kv-range), "
        "no can-accept-adapter (then queue-range (then kv-range)))"
    )
