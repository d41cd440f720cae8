"""The latest resources of all pools, made again only where a pool changed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import xxhash

from extproc.pool.snapshot import Pool
from extproc.xds import resources
from extproc.xds.rendering import Renderer
from extproc.xds.resources import Place, Resource, Snapshot
from extproc.xds.traits import Traits


class _Posted(msgspec.Struct, frozen=True):
    """One pool as it was posted."""

    pool: Pool
    places: tuple[Place, ...]
    assignment: Resource


class Board:
    """Holds a snapshot and replaces it.

    Who is up is told only to Envoys that do not ask engines themselves. The others know better and
    sooner, and would hold an engine for dead that recovered while every picker was down.

    Args:
        traits: What every cluster has in common.
    """

    def __init__(self, traits: Traits) -> None:
        self._renderer = Renderer(traits)
        self._with_health = not traits.health_check.path
        self._posted: dict[str, _Posted] = {}
        self._clusters: dict[str, Resource] = {}
        self.snapshot: Snapshot = {resources.CLUSTER: {}, resources.ASSIGNMENT: {}}

    def behind(self, pools: Mapping[str, Pool]) -> bool:
        """Whether these pools may need another snapshot; cheap enough to ask twenty times a second.

        Scrapes make a new pool each; only its endpoints and who is down matter here.
        """
        if len(pools) != len(self._posted):
            return True
        for name, pool in pools.items():
            posted = self._posted.get(resources.cluster_name(name))
            if posted is None or not self._alike(posted.pool, pool):
                return True
        return False

    def post(self, pools: Mapping[str, Pool]) -> bool:
        """Take over the pools, by their names; returns whether the snapshot is another one now."""
        posted = {
            name: self._post(name, pool)
            for name, pool in ((resources.cluster_name(name), pools[name]) for name in pools)
        }
        clusters = {name: self._clusters.get(name) or self._cluster(name) for name in posted}
        same = clusters.keys() == self._clusters.keys() and all(
            one.assignment is self._posted[name].assignment for name, one in posted.items()
        )
        self._posted, self._clusters = posted, clusters
        self._renderer.keep({place for one in posted.values() for place in one.places})
        if same:
            return False
        self.snapshot = {
            resources.CLUSTER: clusters,
            resources.ASSIGNMENT: {name: one.assignment for name, one in posted.items()},
        }
        return True

    def _post(self, name: str, pool: Pool) -> _Posted:
        before = self._posted.get(name)
        if before is not None and self._alike(before.pool, pool):
            return before
        places = resources.places(pool, with_health=self._with_health)
        if before is not None and before.places == places:
            return _Posted(pool, places, before.assignment)
        return _Posted(pool, places, _versioned(name, self._renderer.assignment(name, places)))

    def _cluster(self, name: str) -> Resource:
        return _versioned(name, self._renderer.cluster(name))

    def _alike(self, one: Pool, other: Pool) -> bool:
        """Whether the same is told of both."""
        if one is other:
            return True
        if one.positions is not other.positions:
            return False
        if not self._with_health or not (one.down or other.down):
            return True
        return [member.up for member in one.members] == [member.up for member in other.members]


def _versioned(name: str, body: bytes) -> Resource:
    return Resource(name, xxhash.xxh3_128_hexdigest(body), body)
