"""Cache of API objects with the pools over them; an update costs what it touches.

Whatever the order in which lists, events and whole collections arrive, the pools are those that a
fresh list of everything would make.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from extproc.discovery import endpoint_list
from extproc.discovery.kubernetes import objects, pool_views, settings, watch_plan
from extproc.discovery.kubernetes.watch_plan import WatchedCollection
from extproc.pool import inference_policy


class CollectionStatus(enum.Enum):
    """Status of a collection on the server."""

    #: Nothing yet.
    UNKNOWN = "unknown"
    #: Here it is.
    LISTED = "listed"
    #: There is no such resource.
    ABSENT = "absent"
    #: We may not see it.
    FORBIDDEN = "forbidden"


class PoolChanges(msgspec.Struct, frozen=True):
    """Pools that changed since the last report.

    Attributes:
        discovered: New or different, by key.
        removed: Keys of those that are no pools of ours any more.
        faults: What making a pool raised, by key; it is tried again at the next call.
    """

    discovered: Mapping[str, endpoint_list.DiscoveredPool]
    removed: frozenset[str]
    faults: Mapping[str, Exception] = {}


class ObjectStore:
    """Cache of API objects, and the views of pools over it.

    Args:
        wanted: What is watched.

    Raises:
        ConfigError: If the sources contradict themselves.
    """

    def __init__(self, wanted: settings.KubernetesSettings) -> None:
        watch_plan.check(wanted.sources)
        self._wanted = wanted
        self.collections = watch_plan.plan_watches(wanted.sources, policies=wanted.policies)
        self._presence = dict.fromkeys(self.collections, CollectionStatus.UNKNOWN)
        self._objects: dict[WatchedCollection, dict[tuple[str, str], objects.Value]] = {
            collection: {} for collection in self.collections
        }
        self._pods: dict[str, dict[str, objects.Pod]] = defaultdict(dict)
        self._pools: dict[str, dict[str, objects.InferencePool]] = defaultdict(dict)
        self._decrees: dict[tuple[watch_plan.ResourceType, str], dict[str, objects.Value]]
        self._decrees = defaultdict(dict)
        self._services = {
            (ref.namespace, ref.name): ref.key
            for ref in wanted.sources
            if isinstance(ref, settings.ServiceRef)
        }
        self._groups = {
            ref.key: ref.group
            for ref in wanted.sources
            if isinstance(ref, settings.InferencePoolRef)
        }
        self._views: dict[str, pool_views.View] = {}
        #: One label of every selector, to find the pools a pod may belong to.
        self._anchors: dict[tuple[str, str, str], dict[str, pool_views.PodView]] = defaultdict(dict)
        self._settled: set[str] = set()
        self._published: dict[str, endpoint_list.DiscoveredPool] = {}
        self._dirty: set[str] = set()
        self._redecreed: set[str] = set()
        for source in wanted.sources:
            self._begin(source)
        self._fixed = frozenset(self._views)

    @property
    def dirty(self) -> bool:
        """True if `collect` may return changes."""
        return bool(self._dirty)

    @property
    def synced(self) -> bool:
        """True once the server has answered for every collection."""
        return all(self.is_synced(collection) for collection in self.collections)

    @property
    def endpoints(self) -> int:
        """Number of endpoints of all pools, as of the last `collect`."""
        return sum(len(pool.endpoints) for pool in self._published.values())

    def replace(
        self, collection: WatchedCollection, values: Iterable[objects.Value]
    ) -> Mapping[tuple[str, str], Exception]:
        """Replaces all objects of a collection; returns the exceptions of objects that failed."""
        faults: dict[tuple[str, str], Exception] = {}
        listed = {(value.namespace, value.name): value for value in values}
        for key in [key for key in self._objects[collection] if key not in listed]:
            self.put(collection, key, None)
        for key, value in listed.items():
            try:
                self.put(collection, key, value)
            except Exception as error:  # noqa: BLE001 - the other objects count
                faults[key] = error
        self.settle(collection, CollectionStatus.LISTED)
        return faults

    def put(
        self, collection: WatchedCollection, key: tuple[str, str], value: objects.Value | None
    ) -> None:
        """Applies one event: an object was added, modified or deleted.

        Args:
            collection: Of which it is an object.
            key: Its namespace and name.
            value: The object; None when it is gone.
        """
        if collection.namespace not in {"", key[0]}:
            return
        known = self._objects[collection]
        old = known.get(key)
        if old == value:
            return
        if value is None:
            del known[key]
        else:
            known[key] = value
        match value or old:
            case objects.Pod():
                self._pod(key, old, value)
            case objects.InferencePool() as pool:
                self._pool(pool, value)
            case objects.EndpointSlice():
                self._slice(old, value)
            case _:
                self._decree(collection.resource, key, old, value)

    def settle(self, collection: WatchedCollection, presence: CollectionStatus) -> None:
        """Records the status of a collection; an absent one is emptied."""
        if self._presence[collection] is presence:
            return
        self._presence[collection] = presence
        if presence is CollectionStatus.ABSENT:
            for name in list(self._objects[collection]):
                self.put(collection, name, None)
        for key, view in self._views.items():
            if collection.namespace in {"", view.namespace}:
                self._redecree(key)
                self._dirty.add(key)

    def is_synced(self, collection: WatchedCollection) -> bool:
        """Returns True if the server has answered for a collection."""
        presence = self._presence[collection]
        if collection.resource.optional:
            return presence is not CollectionStatus.UNKNOWN
        return presence in {CollectionStatus.LISTED, CollectionStatus.ABSENT}

    def collect(self) -> PoolChanges:
        """Returns the pools that changed since the last call, without those not yet complete."""
        changed: dict[str, endpoint_list.DiscoveredPool] = {}
        removed: set[str] = set()
        waiting: set[str] = set()
        faults: dict[str, Exception] = {}
        for key in self._dirty:
            view = self._views.get(key)
            if view is None:
                self._redecreed.discard(key)
                if self._published.pop(key, None) is not None:
                    removed.add(key)
            elif not self._complete(key, view):
                waiting.add(key)
            else:
                try:
                    now = self._build_pool(key, view)
                except Exception as error:  # noqa: BLE001 - the other pools are reported
                    faults[key] = error
                    waiting.add(key)
                    continue
                if self._published.get(key) != now:
                    self._published[key] = changed[key] = now
        self._dirty = waiting
        return PoolChanges(changed, frozenset(removed), faults)

    def _build_pool(self, key: str, view: pool_views.View) -> endpoint_list.DiscoveredPool:
        """Builds the current state of a pool."""
        if key in self._redecreed and isinstance(view, pool_views.PodView):
            view.set_policy(self._policy(view))
        now = view.to_discovered_pool()
        self._redecreed.discard(key)
        return now

    def _begin(self, source: settings.KubernetesSource) -> None:
        """Adds the pools that exist independently of any object."""
        override = self._wanted.override_ip
        match source:
            case settings.InferencePoolRef():
                self._views[source.key] = pool_views.PodView(
                    source.namespace, None, override_ip=override
                )
            case settings.PodSelector():
                spec = pool_views.PoolSpec(selector=source.labels, ports=source.ports)
                view = pool_views.PodView(source.namespace, spec, override_ip=override)
                self._views[source.key] = view
                self._anchor(source.key, view)
            case settings.ServiceRef():
                self._views[source.key] = pool_views.SliceView(source.namespace, source.port)
            case settings.AllPools():
                return
        self._dirty.add(source.key)

    def _pod(
        self, key: tuple[str, str], old: objects.Value | None, new: objects.Value | None
    ) -> None:
        namespace, name = key
        pod = new if isinstance(new, objects.Pod) else None
        if pod is None:
            self._pods[namespace].pop(name, None)
        else:
            self._pods[namespace][name] = pod
        labels: set[tuple[str, str]] = set()
        for version in (old, pod):
            if isinstance(version, objects.Pod):
                labels.update(version.labels.items())
        for label, text in labels:
            for at, view in self._anchors.get((namespace, label, text), _NO_POOLS).items():
                if view.consider(name, pod):
                    self._dirty.add(at)

    def _pool(self, pool: objects.InferencePool, new: objects.Value | None) -> None:
        key = f"{pool.namespace}/{pool.name}"
        if not self._ours(pool, key):
            return
        if isinstance(new, objects.InferencePool):
            self._pools[key][pool.group] = new
        else:
            self._pools[key].pop(pool.group, None)
        known = self._pools[key]
        valid = next((known[group] for group in watch_plan.POOLS_OF if group in known), None)
        view = self._views.get(key)
        if view is None:
            view = pool_views.PodView(pool.namespace, None, override_ip=self._wanted.override_ip)
            self._views[key] = view
        if not isinstance(view, pool_views.PodView):
            return
        self._unanchor(key, view)
        spec = None if valid is None else pool_views.spec_of(valid)
        view.respecify(spec, self._pods[pool.namespace].values())
        self._anchor(key, view)
        self._redecree(key)
        self._dirty.add(key)
        if valid is None and key not in self._fixed:
            del self._views[key], self._pools[key]
            self._settled.discard(key)

    def _ours(self, pool: objects.InferencePool, key: str) -> bool:
        """Returns True if a source covers the pool: by name and group, or an `AllPools`."""
        if key in self._fixed:
            return self._groups.get(key) == pool.group
        return any(
            isinstance(source, settings.AllPools)
            and source.group == pool.group
            and source.namespace in {"", pool.namespace}
            for source in self._wanted.sources
        )

    def _anchor(self, key: str, view: pool_views.PodView) -> None:
        if view.spec is not None:
            self._anchors[self._rarest(view.namespace, view.spec.selector)][key] = view

    def _unanchor(self, key: str, view: pool_views.PodView) -> None:
        if view.spec is None:
            return
        for label, text in view.spec.selector.items():
            at = (view.namespace, label, text)
            if self._anchors.get(at, _NO_POOLS).pop(key, None) and not self._anchors[at]:
                del self._anchors[at]

    def _rarest(self, namespace: str, selector: Mapping[str, str]) -> tuple[str, str, str]:
        """Returns the label that the fewest pools share, so that few pools are checked per pod."""
        places = [(namespace, label, text) for label, text in sorted(selector.items())]
        return min(places, key=lambda place: len(self._anchors.get(place, _NO_POOLS)))

    def _slice(self, old: objects.Value | None, new: objects.Value | None) -> None:
        for endpoint_slice in (old, new):
            if not isinstance(endpoint_slice, objects.EndpointSlice):
                continue
            key = self._services.get((endpoint_slice.namespace, endpoint_slice.service), "")
            view = self._views.get(key)
            if isinstance(view, pool_views.SliceView):
                if endpoint_slice is new:
                    view.slices[endpoint_slice.name] = endpoint_slice
                else:
                    view.slices.pop(endpoint_slice.name, None)
                self._dirty.add(key)

    def _decree(
        self,
        resource: watch_plan.ResourceType,
        key: tuple[str, str],
        old: objects.Value | None,
        new: objects.Value | None,
    ) -> None:
        namespace, name = key
        by_name = self._decrees[resource, namespace]
        if new is None:
            by_name.pop(name, None)
        else:
            by_name[name] = new
        for decree in (old, new):
            if (
                isinstance(decree, objects.ObjectiveObject | objects.RewriteObject)
                and decree.pool is not None
            ):
                self._redecree(f"{namespace}/{decree.pool.name}")

    def _redecree(self, key: str) -> None:
        """Marks the policy of a pool for one rebuild, however many objects changed."""
        self._redecreed.add(key)
        self._dirty.add(key)

    def _policy(self, view: pool_views.PodView) -> inference_policy.InferencePolicy:
        if view.spec is None or view.spec.ref is None:
            return inference_policy.EMPTY_POLICY
        in_force = [
            decree
            for kind in watch_plan.POLICY_RESOURCES
            for decree in self._decrees[self._valid(kind, view.namespace), view.namespace].values()
        ]
        return pool_views.policy_of(
            view.spec.ref,
            [decree for decree in in_force if isinstance(decree, objects.ObjectiveObject)],
            [decree for decree in in_force if isinstance(decree, objects.RewriteObject)],
        )

    def _valid(
        self, kind: tuple[watch_plan.ResourceType, watch_plan.ResourceType], namespace: str
    ) -> watch_plan.ResourceType:
        """Returns the resource of the new API group if it is listed, else that of the old one."""
        new, old = kind
        listed = any(
            collection.covers(new, namespace) and presence is CollectionStatus.LISTED
            for collection, presence in self._presence.items()
        )
        return new if listed else old

    def _complete(self, key: str, view: pool_views.View) -> bool:
        """Returns True once the server has answered for all collections of a pool; final."""
        if key in self._settled:
            return True
        if isinstance(view, pool_views.SliceView):
            needed = [
                collection
                for collection in self.collections
                if collection.resource == watch_plan.SLICES
                and collection.namespace == view.namespace
            ]
        elif view.spec is not None and view.spec.ref is None:
            needed = [
                collection
                for collection in self.collections
                if collection.covers(watch_plan.PODS, view.namespace)
            ]
        else:
            needed = [
                collection
                for collection in self.collections
                if collection.resource != watch_plan.SLICES
                and collection.namespace in {"", view.namespace}
            ]
        if not all(self.is_synced(collection) for collection in needed):
            return False
        self._settled.add(key)
        return True


_NO_POOLS: dict[str, pool_views.PodView] = {}
