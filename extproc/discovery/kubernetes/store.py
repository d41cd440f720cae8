"""Cache of API objects with the pools over them; an update costs what it touches.

Whatever the order in which lists, events and whole collections arrive, the pools are those that a
fresh list of everything would make.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import msgspec

from extproc.discovery import endpoint_list
from extproc.discovery.kubernetes import objects, pool_views, settings, watch_plan
from extproc.discovery.kubernetes.watch_plan import WatchedCollection
from extproc.pool import inference_policy

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


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
    #: The server fails to list it, and only it.
    FAILED = "failed"


class PoolChanges(msgspec.Struct, frozen=True):
    """Pools that changed since the last report.

    Attributes:
        discovered: New or different, by key.
        removed: Keys of those that are no pools of ours any more.
        faults: Exceptions of pools that could not be built, by key; they are retried at the next
            call.
        missing_ports: Of Services that were built, the reason why ready pods are no endpoints, by key;
            empty where they are.
    """

    discovered: Mapping[str, endpoint_list.DiscoveredPool]
    removed: frozenset[str]
    faults: Mapping[str, Exception] = {}
    missing_ports: Mapping[str, str] = {}


class ObjectStore:
    """Cache of API objects, and the views of pools over it.

    Raises:
        ConfigError: If the sources contradict themselves.
    """

    def __init__(self, kubernetes_settings: settings.KubernetesSettings) -> None:
        watch_plan.check_sources(kubernetes_settings.sources)
        self._settings = kubernetes_settings
        self.collections = watch_plan.plan_watches(
            kubernetes_settings.sources, policies=kubernetes_settings.policies
        )
        self._statuses = dict.fromkeys(self.collections, CollectionStatus.UNKNOWN)
        self._objects: dict[WatchedCollection, dict[tuple[str, str], objects.Value]] = {
            collection: {} for collection in self.collections
        }
        self._pods: dict[str, dict[str, objects.Pod]] = {}
        self._pools: dict[str, dict[str, objects.InferencePool]] = defaultdict(dict)
        self._policy_objects: dict[
            tuple[watch_plan.ResourceType, str], dict[str, objects.Value]
        ] = {}
        self._services = {
            (ref.namespace, ref.name): ref.key
            for ref in kubernetes_settings.sources
            if isinstance(ref, settings.ServiceRef)
        }
        self._groups = {
            ref.key: ref.group
            for ref in kubernetes_settings.sources
            if isinstance(ref, settings.InferencePoolRef)
        }
        self._views: dict[str, pool_views.View] = {}
        #: One label of every selector, to find the pools a pod may belong to; `_ANY_LABEL` of one
        #: without labels.
        self._views_by_label: dict[tuple[str, str, str], dict[str, pool_views.PodView]] = (
            defaultdict(dict)
        )
        self._complete_pools: set[str] = set()
        self._published: dict[str, endpoint_list.DiscoveredPool] = {}
        self._dirty: set[str] = set()
        self._policy_changed: set[str] = set()
        for source in kubernetes_settings.sources:
            self._add_source(source)
        self._configured = frozenset(self._views)

    @property
    def has_changes(self) -> bool:
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
            self.apply(collection, key, None)
        for key, value in listed.items():
            try:
                self.apply(collection, key, value)
            except Exception as error:  # noqa: BLE001 - the other objects count
                faults[key] = error
        self.set_status(collection, CollectionStatus.LISTED)
        return faults

    def apply(
        self, collection: WatchedCollection, key: tuple[str, str], value: objects.Value | None
    ) -> None:
        """Applies one event: an object was added, modified or, where `value` is None, deleted."""
        if collection.namespace not in {"", key[0]}:
            return
        stored = self._objects[collection]
        old = stored.get(key)
        if old == value:
            return
        if value is None:
            del stored[key]
        else:
            stored[key] = value
        match value or old:
            case objects.Pod():
                self._apply_pod(key, old, value)
            case objects.InferencePool() as pool:
                self._apply_pool(pool, value)
            case objects.EndpointSlice():
                self._apply_slice(old, value)
            case _:
                self._apply_policy_object(collection.resource, key, old, value)

    def set_status(self, collection: WatchedCollection, status: CollectionStatus) -> None:
        """Records the status of a collection; an absent one is emptied."""
        if self._statuses[collection] is status:
            return
        self._statuses[collection] = status
        if status is CollectionStatus.ABSENT:
            for name in list(self._objects[collection]):
                self.apply(collection, name, None)
        for key, view in self._views.items():
            if collection.namespace in {"", view.namespace}:
                self._mark_policy_changed(key)
                self._dirty.add(key)

    def is_synced(self, collection: WatchedCollection) -> bool:
        """Returns True if the server has answered for a collection."""
        status = self._statuses[collection]
        if collection.resource.optional:
            return status is not CollectionStatus.UNKNOWN
        return status in {CollectionStatus.LISTED, CollectionStatus.ABSENT}

    def collect(self) -> PoolChanges:
        """Returns the pools that changed since the last call, without those not yet complete."""
        changed: dict[str, endpoint_list.DiscoveredPool] = {}
        removed: set[str] = set()
        waiting: set[str] = set()
        faults: dict[str, Exception] = {}
        missing_ports: dict[str, str] = {}
        for key in self._dirty:
            view = self._views.get(key)
            if view is None:
                self._policy_changed.discard(key)
                if self._published.pop(key, None) is not None:
                    removed.add(key)
            elif not self._is_complete(key, view):
                waiting.add(key)
            else:
                try:
                    now = self._build_pool(key, view)
                    if isinstance(view, pool_views.SliceView):
                        missing_ports[key] = view.describe_missing_port()
                except Exception as error:  # noqa: BLE001 - the other pools are reported
                    faults[key] = error
                    waiting.add(key)
                    continue
                if self._published.get(key) != now:
                    self._published[key] = changed[key] = now
        self._dirty = waiting
        return PoolChanges(changed, frozenset(removed), faults, missing_ports)

    def _build_pool(self, key: str, view: pool_views.View) -> endpoint_list.DiscoveredPool:
        """Builds the current state of a pool."""
        if key in self._policy_changed and isinstance(view, pool_views.PodView):
            view.set_policy(self._build_policy(view))
        now = view.to_discovered_pool()
        self._policy_changed.discard(key)
        return now

    def _add_source(self, source: settings.KubernetesSource) -> None:
        """Adds the pools that exist independently of any object."""
        match source:
            case settings.InferencePoolRef():
                self._views[source.key] = pool_views.PodView(source.namespace, None)
            case settings.PodSelector():
                pool = objects.InferencePool(
                    namespace=source.namespace,
                    name=source.name,
                    group="",
                    selector=source.labels,
                    ports=source.ports,
                    expressions=source.expressions,
                )
                view = pool_views.PodView(source.namespace, pool)
                self._views[source.key] = view
                self._index_view(source.key, view)
            case settings.ServiceRef():
                self._views[source.key] = pool_views.SliceView(source.namespace, source.port)
            case settings.AllPools():
                return
        self._dirty.add(source.key)

    def _apply_pod(
        self, key: tuple[str, str], old: objects.Value | None, new: objects.Value | None
    ) -> None:
        namespace, name = key
        pod = new if isinstance(new, objects.Pod) else None
        _set_or_remove(self._pods, namespace, name, pod)
        labels = {_ANY_LABEL}
        for version in (old, pod):
            if isinstance(version, objects.Pod):
                labels.update(version.labels.items())
        for label, text in labels:
            for pool_key, view in self._views_by_label.get(
                (namespace, label, text), _NO_POOLS
            ).items():
                if view.update_pod(name, pod):
                    self._dirty.add(pool_key)

    def _apply_pool(self, pool: objects.InferencePool, new: objects.Value | None) -> None:
        key = f"{pool.namespace}/{pool.name}"
        if not self._is_covered(pool, key):
            return
        if isinstance(new, objects.InferencePool):
            self._pools[key][pool.group] = new
        else:
            self._pools[key].pop(pool.group, None)
        by_group = self._pools[key]
        current = next(
            (by_group[group] for group in watch_plan.POOLS_OF if group in by_group), None
        )
        view = self._views.get(key)
        if view is None:
            view = pool_views.PodView(pool.namespace, None)
            self._views[key] = view
        if not isinstance(view, pool_views.PodView):
            return
        self._unindex_view(key, view)
        view.set_pool(current, self._pods.get(pool.namespace, {}).values())
        self._index_view(key, view)
        self._mark_policy_changed(key)
        self._dirty.add(key)
        if current is None and key not in self._configured:
            del self._views[key], self._pools[key]
            self._complete_pools.discard(key)

    def _is_covered(self, pool: objects.InferencePool, key: str) -> bool:
        """Returns True if a source covers the pool: by name and group, or an `AllPools`."""
        if key in self._configured:
            return self._groups.get(key) == pool.group
        return any(
            isinstance(source, settings.AllPools)
            and source.group == pool.group
            and source.namespace in {"", pool.namespace}
            for source in self._settings.sources
        )

    def _index_view(self, key: str, view: pool_views.PodView) -> None:
        if view.pool is not None:
            self._views_by_label[self._rarest_label(view.namespace, view.pool.selector)][key] = view

    def _unindex_view(self, key: str, view: pool_views.PodView) -> None:
        if view.pool is None:
            return
        for label, text in view.pool.selector.items():
            label_key = (view.namespace, label, text)
            if (
                self._views_by_label.get(label_key, _NO_POOLS).pop(key, None)
                and not self._views_by_label[label_key]
            ):
                del self._views_by_label[label_key]

    def _rarest_label(self, namespace: str, selector: Mapping[str, str]) -> tuple[str, str, str]:
        """Returns the label that the fewest pools share, so that few pools are checked per pod."""
        labels = sorted(selector.items()) or [_ANY_LABEL]
        label_keys = [(namespace, label, text) for label, text in labels]
        return min(
            label_keys, key=lambda label_key: len(self._views_by_label.get(label_key, _NO_POOLS))
        )

    def _apply_slice(self, old: objects.Value | None, new: objects.Value | None) -> None:
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

    def _apply_policy_object(
        self,
        resource: watch_plan.ResourceType,
        key: tuple[str, str],
        old: objects.Value | None,
        new: objects.Value | None,
    ) -> None:
        namespace, name = key
        _set_or_remove(self._policy_objects, (resource, namespace), name, new)
        for policy_object in (old, new):
            if (
                isinstance(policy_object, objects.ObjectiveObject | objects.RewriteObject)
                and policy_object.pool is not None
            ):
                self._mark_policy_changed(f"{namespace}/{policy_object.pool.name}")

    def _mark_policy_changed(self, key: str) -> None:
        """Marks the policy of a pool for one rebuild, however many objects changed."""
        self._policy_changed.add(key)
        self._dirty.add(key)

    def _build_policy(self, view: pool_views.PodView) -> inference_policy.InferencePolicy:
        if view.pool is None or view.pool.ref is None:
            return inference_policy.EMPTY_POLICY
        namespace = view.namespace
        policy_objects = [
            policy_object
            for kind in watch_plan.POLICY_RESOURCES
            for policy_object in self._policy_objects.get(
                (self._current_resource(kind, namespace), namespace), {}
            ).values()
        ]
        return pool_views.build_policy(view.pool.ref, policy_objects)

    def _current_resource(
        self, kind: tuple[watch_plan.ResourceType, watch_plan.ResourceType], namespace: str
    ) -> watch_plan.ResourceType:
        """Returns the resource of the new API group, or that of the old one where only this is installed."""
        new, old = kind
        absent = any(
            collection.covers(new, namespace) and status is CollectionStatus.ABSENT
            for collection, status in self._statuses.items()
        )
        return old if absent else new

    def _is_complete(self, key: str, view: pool_views.View) -> bool:
        """Returns True once the server has answered for all collections of a pool; final."""
        if key in self._complete_pools:
            return True
        if isinstance(view, pool_views.SliceView):
            needed = {watch_plan.SLICES}
        elif view.pool is not None and view.pool.ref is None:
            needed = {watch_plan.PODS}
        else:
            needed = {collection.resource for collection in self.collections} - {watch_plan.SLICES}
        for collection in self.collections:
            in_namespace = collection.namespace in {"", view.namespace}
            if collection.resource in needed and in_namespace and not self.is_synced(collection):
                return False
        self._complete_pools.add(key)
        return True


#: Stands for the labels of every pod; no label has an empty name.
_ANY_LABEL: tuple[str, str] = ("", "")

_NO_POOLS: dict[str, pool_views.PodView] = {}


def _set_or_remove(
    tables: dict[_Key, dict[str, _Value]], key: _Key, name: str, value: _Value | None
) -> None:
    """Put a value into the table of a key, or remove it for None; an empty table is removed too."""
    if value is not None:
        tables.setdefault(key, {})[name] = value
        return
    table = tables.get(key)
    if table is not None:
        table.pop(name, None)
        if not table:
            del tables[key]
