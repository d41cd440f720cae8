"""Cache of the latest resources of all pools; rebuilds only those of changed pools."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import xxhash

from extproc.pool.snapshot import Pool
from extproc.xds import encoder, resources
from extproc.xds.resources import ClusterOptions, LbEndpoint, XdsResource, XdsSnapshot


class _CacheEntry(msgspec.Struct, frozen=True):
    """One pool with the resources built from it."""

    pool: Pool
    h2c: bool
    lb_endpoints: tuple[LbEndpoint, ...]
    assignment: XdsResource
    cluster: XdsResource


class SnapshotCache:
    """Holds the current snapshot and replaces it.

    Health is sent only to Envoys without health checks of their own. The others know it sooner,
    and would eject an engine that recovered while every replica of extproc was down.

    Args:
        options: Options of every cluster.
        faults: Exceptions of the last update by pool name; such a pool keeps its resources.

    Attributes:
        snapshot: The latest resources.
        faults: What posting a pool raised the last time, by its name; it stays as it was before.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._with_health = not options.health_check.path
        self._entries: dict[str, _CacheEntry] = {}
        self.faults: dict[str, Exception] = {}
        self.snapshot: XdsSnapshot = {resources.CLUSTER: {}, resources.ASSIGNMENT: {}}

    def is_stale(self, pools: Mapping[str, Pool], h2c: Collection[str] = ()) -> bool:
        """Returns True if the pools may need another snapshot; cheap enough for 20 calls a second.

        Scrapes make a new pool each; only its endpoints, and perhaps who is up, matter here.

        Args:
            pools: Pools by name.
            h2c: Names of those whose engines speak HTTP/2 without TLS.
        """
        if len(pools) != len(self._entries):
            return True
        for name, pool in pools.items():
            entry = self._entries.get(resources.cluster_name(name))
            if entry is None or entry.h2c is not (name in h2c):
                return True
            if not self._has_same_endpoints(entry.pool, pool):
                return True
        return False

    def update(self, pools: Mapping[str, Pool], h2c: Collection[str] = ()) -> bool:
        """Rebuilds resources of changed pools; returns True if the snapshot changed.

        Args:
            pools: Pools by name.
            h2c: Names of pools whose engines speak HTTP/2 without TLS.
        """
        self.faults.clear()
        entries: dict[str, _CacheEntry] = {}
        for name, pool in pools.items():
            cluster = resources.cluster_name(name)
            try:
                entries[cluster] = self._build_entry(name, pool, h2c=name in h2c)
            except Exception as error:  # noqa: BLE001 - the other pools are published
                self.faults[name] = error
                if cluster in self._entries:
                    entries[cluster] = self._entries[cluster]
        self._entries = entries
        new: XdsSnapshot = {
            resources.CLUSTER: {name: entry.cluster for name, entry in entries.items()},
            resources.ASSIGNMENT: {name: entry.assignment for name, entry in entries.items()},
        }
        if new == self.snapshot:
            return False
        self.snapshot = new
        return True

    def _build_entry(self, pool_name: str, pool: Pool, *, h2c: bool) -> _CacheEntry:
        name = resources.cluster_name(pool_name)
        before = self._entries.get(name)
        if before is None or before.h2c is not h2c:
            cluster = _versioned(name, encoder.encode_cluster(name, self._options, h2c=h2c))
        elif self._has_same_endpoints(before.pool, pool):
            return before
        else:
            cluster = before.cluster
        lb_endpoints = resources.lb_endpoints(pool, with_health=self._with_health)
        if before is not None and before.lb_endpoints == lb_endpoints:
            return _CacheEntry(pool, h2c, lb_endpoints, before.assignment, cluster)
        assignment = _versioned(name, encoder.encode_assignment(name, lb_endpoints))
        return _CacheEntry(pool, h2c, lb_endpoints, assignment, cluster)

    def _has_same_endpoints(self, previous: Pool, current: Pool) -> bool:
        """Returns True if both snapshots of a pool give the same endpoints and health."""
        if previous is current:
            return True
        if previous.positions is not current.positions:
            return False
        if not self._with_health or not (previous.down or current.down):
            return True
        return [member.is_up for member in previous.members] == [
            member.is_up for member in current.members
        ]


def _versioned(name: str, body: bytes) -> XdsResource:
    return XdsResource(name, xxhash.xxh3_128_hexdigest(body), body)
