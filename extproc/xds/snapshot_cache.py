"""Cache of the latest resources of all pools; rebuilds only those of changed pools."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import xxhash

from extproc.pool.snapshot import Pool
from extproc.xds import resources
from extproc.xds.encoder import ResourceEncoder
from extproc.xds.resources import ClusterOptions, LbEndpoint, XdsResource, XdsSnapshot


class _CacheEntry(msgspec.Struct, frozen=True):
    """One pool with the resources built from it."""

    pool: Pool
    h2c: bool
    places: tuple[LbEndpoint, ...]
    assignment: XdsResource
    cluster: XdsResource


class SnapshotCache:
    """Holds the current snapshot and replaces it.

    Health is sent only to Envoys without health checks of their own. The others know it sooner,
    and would eject an engine that recovered while every replica of extproc was down.

    Args:
        traits: What every cluster has in common.

    Attributes:
        snapshot: The latest resources.
        faults: What posting a pool raised the last time, by its name; it stays as it was before.
    """

    def __init__(self, traits: ClusterOptions) -> None:
        self._renderer = ResourceEncoder(traits)
        self._with_health = not traits.health_check.path
        self._entries: dict[str, _CacheEntry] = {}
        self.faults: dict[str, Exception] = {}
        self.snapshot: XdsSnapshot = {resources.CLUSTER: {}, resources.ASSIGNMENT: {}}

    def is_stale(self, pools: Mapping[str, Pool], h2c: Collection[str] = ()) -> bool:
        """Returns True if the pools may need another snapshot; cheap enough for 20 calls a second.

        Scrapes make a new pool each; only its endpoints, and perhaps who is up, matter here.

        Args:
            pools: By their names.
            h2c: Names of those whose engines speak HTTP/2 without TLS.
        """
        if len(pools) != len(self._entries):
            return True
        for name, pool in pools.items():
            posted = self._entries.get(resources.cluster_name(name))
            if posted is None or posted.h2c is not (name in h2c):
                return True
            if not self._alike(posted.pool, pool):
                return True
        return False

    def update(self, pools: Mapping[str, Pool], h2c: Collection[str] = ()) -> bool:
        """Rebuilds resources of changed pools; returns True if the snapshot changed.

        Args:
            pools: By their names.
            h2c: As in `is_stale`.
        """
        self.faults.clear()
        posted: dict[str, _CacheEntry] = {}
        for name, pool in pools.items():
            cluster = resources.cluster_name(name)
            try:
                posted[cluster] = self._post(name, pool, h2c=name in h2c)
            except Exception as error:  # noqa: BLE001 - the other pools are published
                self.faults[name] = error
                if cluster in self._entries:
                    posted[cluster] = self._entries[cluster]
        self._entries = posted
        self._renderer.keep({place for entry in posted.values() for place in entry.places})
        new: XdsSnapshot = {
            resources.CLUSTER: {name: entry.cluster for name, entry in posted.items()},
            resources.ASSIGNMENT: {name: entry.assignment for name, entry in posted.items()},
        }
        if new == self.snapshot:
            return False
        self.snapshot = new
        return True

    def _post(self, pool_name: str, pool: Pool, *, h2c: bool) -> _CacheEntry:
        name = resources.cluster_name(pool_name)
        before = self._entries.get(name)
        if before is None or before.h2c is not h2c:
            cluster = _versioned(name, self._renderer.cluster(name, h2c=h2c))
        elif self._alike(before.pool, pool):
            return before
        else:
            cluster = before.cluster
        places = resources.lb_endpoints(pool, with_health=self._with_health)
        if before is not None and before.places == places:
            return _CacheEntry(pool, h2c, places, before.assignment, cluster)
        assignment = _versioned(name, self._renderer.assignment(name, places))
        return _CacheEntry(pool, h2c, places, assignment, cluster)

    def _alike(self, previous: Pool, current: Pool) -> bool:
        """Returns True if both snapshots of a pool give the same endpoints and health."""
        if previous is current:
            return True
        if previous.positions is not current.positions:
            return False
        if not self._with_health or not (previous.down or current.down):
            return True
        return [member.up for member in previous.members] == [
            member.up for member in current.members
        ]


def _versioned(name: str, body: bytes) -> XdsResource:
    return XdsResource(name, xxhash.xxh3_128_hexdigest(body), body)
