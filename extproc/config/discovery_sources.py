"""Table of discovery sources: where the endpoints of a pool may come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec

from extproc.config import pool_schema
from extproc.discovery import endpoint_list, static_discovery
from extproc.errors import ConfigError
from extproc.pool.store import PoolStore
from extproc.supervision import Supervisor


class DiscoveryContext(msgspec.Struct, frozen=True, kw_only=True):
    """Dependencies of the discovery of a pool.

    Attributes:
        settings: Settings of endpoints file and DNS names.
        flag_entries: Endpoints of the configuration and the command line.
        store: Receiver of the endpoints.
        rng: Source of randomness.
        supervisor: Receives successes and failures of steps.
    """

    settings: static_discovery.StaticDiscoverySettings
    flag_entries: Sequence[endpoint_list.EndpointListEntry]
    store: PoolStore
    rng: random.Random
    clock: Callable[[], float]
    on_event: Callable[[static_discovery.DiscoveryEvent], None]
    supervisor: Supervisor


class EndpointDiscovery(Protocol):
    """Follows a source and keeps the store of its pool current."""

    @property
    def dropped_addresses(self) -> int:
        """Addresses beyond the limit of a pool, which are no endpoints (count)."""

    async def start(self) -> None:
        """Load the source once.

        Raises:
            ConfigError: The source cannot be read.
        """

    async def run(self) -> None:
        """Follow the source until cancelled; requires `start`."""


class DiscoverySource(Protocol):
    """Kind of source of endpoints: row of `SOURCES`.

    Attributes:
        key: Path of the setting in a pool section that selects and configures it.
        in_kubernetes: True if the endpoints come from an API server.
    """

    key: ClassVar[str]
    in_kubernetes: ClassVar[bool]

    def is_configured(self, pool: pool_schema.PoolSource) -> bool:
        """Return True if a pool section selects this source."""

    def check(self, pool: pool_schema.PoolSource, where: str) -> None:
        """Reject a setting that contradicts itself; `where` is its location.

        Raises:
            ConfigError: It does.
        """

    def describe(self, pool: pool_schema.PoolSource) -> Iterator[str]:
        """Describe the source for `extproc check`: what it is, then a line for each endpoint.

        Raises:
            ConfigError: The source cannot be read.
        """

    def build(self, context: DiscoveryContext) -> EndpointDiscovery | None:
        """Build the discovery of a pool; None where another component sets its endpoints."""


class EndpointListSource:
    """Endpoints of the configuration or the command line; names are resolved by DNS."""

    key: ClassVar[str] = "endpoints"
    in_kubernetes: ClassVar[bool] = False

    def is_configured(self, pool: pool_schema.PoolSource) -> bool:
        """See `DiscoverySource`."""
        return bool(pool.endpoints)

    def check(self, pool: pool_schema.PoolSource, where: str) -> None:
        """See `DiscoverySource`: addresses are checked by `parse_entries`."""

    def describe(self, pool: pool_schema.PoolSource) -> Iterator[str]:
        """See `DiscoverySource`."""
        listed = parse_entries(pool, where="pool")
        yield f"{len(listed)} listed{_owner(pool)}"
        yield from map(_describe_entry, listed)

    def build(self, context: DiscoveryContext) -> EndpointDiscovery | None:
        """See `DiscoverySource`."""
        return static_discovery.StaticDiscovery(
            context.settings,
            context.store,
            flag_entries=context.flag_entries,
            resolver=static_discovery.DnsResolver(),
            clock=context.clock,
            rng=context.rng,
            on_event=context.on_event,
            supervisor=context.supervisor,
        )


class EndpointsFileSource(EndpointListSource):
    """Endpoints of a file that is watched; names are resolved by DNS."""

    key: ClassVar[str] = "endpoints_file"

    def is_configured(self, pool: pool_schema.PoolSource) -> bool:
        """See `DiscoverySource`."""
        return bool(pool.endpoints_file)

    def describe(self, pool: pool_schema.PoolSource) -> Iterator[str]:
        """See `DiscoverySource`."""
        limit_bytes = static_discovery.StaticDiscoverySettings().limit_bytes
        listed = static_discovery.load_file(Path(pool.endpoints_file), limit_bytes=limit_bytes)
        yield f"{len(listed)} in {pool.endpoints_file}, watched{_owner(pool)}"
        yield from map(_describe_entry, listed)


class KubernetesSource:
    """Endpoints of an InferencePool, a Service or pods.

    `kubernetes_plan` collects the objects of all pools, and one `KubernetesDiscovery` watches them.
    """

    key: ClassVar[str] = "kubernetes"
    in_kubernetes: ClassVar[bool] = True

    def is_configured(self, pool: pool_schema.PoolSource) -> bool:
        """See `DiscoverySource`."""
        return pool.kubernetes is not None

    def check(self, pool: pool_schema.PoolSource, where: str) -> None:
        """See `DiscoverySource`."""
        if pool.kubernetes is not None:
            _check_single_object(pool.kubernetes, where)

    def describe(self, pool: pool_schema.PoolSource) -> Iterator[str]:
        """See `DiscoverySource`."""
        if pool.kubernetes is not None:
            yield f"from Kubernetes: {_describe_object(pool.kubernetes)}{_owner(pool)}"

    def build(self, context: DiscoveryContext) -> None:
        """See `DiscoverySource`."""
        del context


class StartedEnginesSource:
    """Engines that an actuator starts, and that it publishes itself."""

    key: ClassVar[str] = "autoscaling.launch"
    in_kubernetes: ClassVar[bool] = False

    def is_configured(self, pool: pool_schema.PoolSource) -> bool:
        """See `DiscoverySource`."""
        return pool.autoscaling is not None and pool.autoscaling.launch is not None

    def check(self, pool: pool_schema.PoolSource, where: str) -> None:
        """See `DiscoverySource`: the section `autoscaling` has a check of its own."""

    def describe(self, pool: pool_schema.PoolSource) -> Iterator[str]:
        """See `DiscoverySource`."""
        if pool.autoscaling is not None and pool.autoscaling.launch is not None:
            command = " ".join(pool.autoscaling.launch.command)
            yield f"started here{_owner(pool)}: {command}"

    def build(self, context: DiscoveryContext) -> None:
        """See `DiscoverySource`."""
        del context


#: Every source; a pool has at most one.
SOURCES: tuple[DiscoverySource, ...] = (
    EndpointListSource(),
    EndpointsFileSource(),
    KubernetesSource(),
    StartedEnginesSource(),
)


def configured_sources(pool: pool_schema.PoolSource) -> Sequence[DiscoverySource]:
    """Return the sources that a pool section selects; more than one is an error."""
    return [source for source in SOURCES if source.is_configured(pool)]


def parse_entries(
    pool: pool_schema.PoolSource, *, where: str
) -> tuple[endpoint_list.EndpointListEntry, ...]:
    """Parse the endpoints listed in a pool section, as those of an endpoints file.

    Raises:
        ConfigError: An address is invalid or a duplicate.
    """
    listed: list[object] = [
        {"address": entry.address, "name": entry.name, "labels": dict(entry.labels)}
        if isinstance(entry, pool_schema.EndpointEntry)
        else entry
        for entry in pool.endpoints
    ]
    return endpoint_list.from_document({"endpoints": listed}, where=where)


def _check_single_object(section: pool_schema.KubernetesSection, where: str) -> None:
    named = [
        name
        for name, value in (
            ("inference_pool", section.inference_pool),
            ("selector", section.selector),
            ("service", section.service),
        )
        if value
    ]
    if len(named) != 1:
        raise ConfigError(
            where,
            wanted="one of inference_pool, selector and service",
            got=" and ".join(named) or "none of them",
            fix="name the one object whose endpoints these are",
        )
    misplaced = [
        (name, owner)
        for name, value, owner in (
            ("ports", section.ports, "selector"),
            ("port", section.port, "service"),
        )
        if value and owner not in named
    ]
    for name, owner in misplaced:
        raise ConfigError(
            where,
            wanted=f"{name} only with {owner}",
            got=f"{name} with {named[0]}",
            fix=f"remove {name}; {named[0]} says itself which ports there are",
        )


def _owner(pool: pool_schema.PoolSource) -> str:
    return f" of pool {pool.name}" if pool.name else ""


def _describe_object(section: pool_schema.KubernetesSection) -> str:
    place = f" in namespace {section.namespace}" if section.namespace else ""
    if section.inference_pool:
        return f"InferencePool {section.inference_pool} ({section.group}){place}"
    if section.service:
        port = f", port {section.port}" if section.port else ""
        return f"EndpointSlices of Service {section.service}{port}{place}"
    labels = ",".join(f"{key}={value}" for key, value in sorted(section.selector.items()))
    ports = ", ".join(map(str, section.ports)) or "of their annotations"
    return f"pods with {labels}, ports {ports}{place}"


def _describe_entry(entry: endpoint_list.EndpointListEntry) -> str:
    host = f"[{entry.host}]" if ":" in entry.host else entry.host
    words = [f"{host}:{entry.port}"]
    if not entry.literal:
        words.append("(every address of this name)")
    if entry.name:
        words.append(entry.name)
    words += [f"{key}={value}" for key, value in sorted(entry.labels.items())]
    return "  ".join(words)
