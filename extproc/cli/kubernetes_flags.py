"""Flags of the upstream EPP for Kubernetes discovery, as overrides of settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from extproc.cli import flag_table
from extproc.config import loader
from extproc.errors import ConfigError


class ObjectFlag(msgspec.Struct, frozen=True):
    """One flag.

    Attributes:
        name: Without dashes.
        metavar: Placeholder of the value in the help text.
        text: Help text.
    """

    name: str
    metavar: str
    text: str


FLAGS: Sequence[ObjectFlag] = (
    ObjectFlag(
        "pool-name", "NAME", "InferencePool to follow; with endpoints of your own only a label"
    ),
    ObjectFlag(
        "pool-namespace", "NAME", "namespace of the pool; $NAMESPACE or the pod's own if unset"
    ),
    ObjectFlag("pool-group", "GROUP", "API group of the InferencePool"),
    ObjectFlag("endpoint-selector", "a=b,c=d", "labels of pods to follow without an InferencePool"),
    ObjectFlag("endpoint-target-ports", "PORT,...", "ports of these pods, each an endpoint"),
)


def overrides(
    args: argparse.Namespace, tree: Mapping[str, object]
) -> Iterator[loader.FlagOverride]:
    """Overrides of settings from the flags.

    Args:
        tree: The configuration file as it was written.

    Raises:
        ConfigError: A flag is wrong, or goes with another source of endpoints.
    """
    name, selector = args.pool_name, args.endpoint_selector
    if name:
        yield loader.FlagOverride(("pool", "name"), name, "--pool-name")
    pool = tree.get("pool")
    written = dict(pool) if isinstance(pool, dict) else {}
    listed = bool(args.endpoints or args.endpoints_file)
    elsewhere = listed or any(written.get(key) for key in ("endpoints", "endpoints_file"))
    if selector and (listed or elsewhere):
        raise ConfigError(
            "--endpoint-selector",
            wanted="one source of endpoints",
            got="endpoints listed besides",
            fix="remove one of them",
        )
    if elsewhere or tree.get("pools"):
        return
    before = written.get("kubernetes")
    section = _object(args, before if isinstance(before, dict) else {})
    if section:
        if section != before:
            flag = "--endpoint-selector" if selector else "--pool-name"
            yield loader.FlagOverride(("pool", "kubernetes"), section, flag)
    elif args.pool_namespace and _every_pool(tree):
        yield loader.FlagOverride(("cluster", "namespace"), args.pool_namespace, "--pool-namespace")


def _object(args: argparse.Namespace, before: Mapping[str, object]) -> dict[str, object]:
    """Section `pool.kubernetes` with the flags applied; empty where no object is named."""
    section = dict(before)
    if args.endpoint_selector:
        section.pop("inference_pool", None)
        section.pop("service", None)
        section["selector"] = labels(args.endpoint_selector)
    elif args.pool_name and not (section.get("selector") or section.get("service")):
        section["inference_pool"] = args.pool_name
    if not any(section.get(key) for key in ("inference_pool", "selector", "service")):
        return {}
    if args.endpoint_target_ports and args.endpoint_target_ports != "[]":
        section["ports"] = ports(args.endpoint_target_ports)
    if args.pool_namespace:
        section["namespace"] = args.pool_namespace
    if args.pool_group and section.get("inference_pool"):
        section["group"] = args.pool_group
    return section


def ineffective(args: argparse.Namespace, *, followed: bool) -> Iterator[str]:
    """A warning for each of these flags that changes nothing.

    Args:
        followed: Whether anything is followed in Kubernetes.
    """
    if followed:
        return
    for flag in FLAGS[1:]:
        value = getattr(args, flag.name.replace("-", "_"))
        if value and value != "[]":
            yield f"--{flag.name} has no effect: no endpoints come from Kubernetes"


def labels(text: str) -> dict[str, str]:
    """`a=b,c=d` to a mapping.

    Raises:
        ConfigError: A part is no pair.
    """
    pairs = {}
    for word in flag_table.listed("--endpoint-selector", text):
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                "--endpoint-selector",
                wanted="labels as key=value, separated by commas",
                got=word,
                fix="write app=vllm,tier=gpu",
            )
        pairs[key.strip()] = value.removeprefix("=").strip()
    return pairs


def ports(text: str) -> list[int]:
    """`8000,8001` to numbers; the brackets of a Go list are taken too.

    Raises:
        ConfigError: One is none.
    """
    words = flag_table.listed("--endpoint-target-ports", text.strip("[]").replace(" ", ","))
    return [flag_table.whole_number("--endpoint-target-ports", word) for word in words]


def _every_pool(tree: Mapping[str, object]) -> bool:
    cluster = tree.get("cluster")
    return isinstance(cluster, dict) and cluster.get("discover_pools") == "namespace"
