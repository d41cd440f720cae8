"""Watch plan: the fewest and narrowest collections that the sources need, and their status.

Without I/O: a reflector reports its state, `WatchStatuses` returns the changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec

from extproc.discovery.kubernetes import settings
from extproc.endpoint import LabelExpression
from extproc.errors import ConfigError


class ResourceType(msgspec.Struct, frozen=True):
    """A resource in one version.

    Attributes:
        group: API group; empty for the core one.
        optional: Whether pools can be known without it.
    """

    group: str
    version: str
    plural: str
    optional: bool = False

    @property
    def title(self) -> str:
        """Display name, in the form of kubectl."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = ResourceType("", "v1", "pods")
SLICES = ResourceType("discovery.k8s.io", "v1", "endpointslices")
POOLS = ResourceType(settings.POOL_GROUP, "v1", "inferencepools")
OLD_POOLS = ResourceType(settings.OLD_POOL_GROUP, "v1alpha2", "inferencepools")

_NEW = "llm-d.ai"
_OLD = settings.OLD_POOL_GROUP
OBJECTIVES = ResourceType(_NEW, "v1alpha2", "inferenceobjectives", optional=True)
OLD_OBJECTIVES = ResourceType(_OLD, "v1alpha2", "inferenceobjectives", optional=True)
REWRITES = ResourceType(_NEW, "v1alpha2", "inferencemodelrewrites", optional=True)
OLD_REWRITES = ResourceType(_OLD, "v1alpha2", "inferencemodelrewrites", optional=True)

#: Those that make a policy; the first of a kind that is installed counts, alone
#: (docs/spec/protocol.md#inferenceobjective).
POLICY_RESOURCES = ((OBJECTIVES, OLD_OBJECTIVES), (REWRITES, OLD_REWRITES))

#: By API group of an InferencePool.
POOLS_OF = {settings.POOL_GROUP: POOLS, settings.OLD_POOL_GROUP: OLD_POOLS}


_T = TypeVar("_T")


def api_path(group: str, version: str, namespace: str, *segments: str) -> str:
    """Path of the API, every segment quoted: a name never ends the path or leaves its place.

    Args:
        group: API group; empty for the core one.
        namespace: Namespace of the objects; empty for all.
        segments: Further path segments, such as `events` and a name.
    """
    root = ("apis", group) if group else ("api",)
    where = ("namespaces", namespace) if namespace else ()
    path = (*root, version, *where, *segments)
    return "".join(f"/{quote(segment, safe='')}" for segment in path)


class WatchedCollection(msgspec.Struct, frozen=True):
    """One collection to list and watch.

    Attributes:
        namespace: Namespace to watch; empty for all namespaces.
        labels: Label selector in the API's form; empty for all.
        fields: Field selector in the API's form; empty for all.
    """

    resource: ResourceType
    namespace: str = ""
    labels: str = ""
    fields: str = ""

    @property
    def path(self) -> str:
        """API path of the collection."""
        resource = self.resource
        return api_path(resource.group, resource.version, self.namespace, resource.plural)

    @property
    def title(self) -> str:
        """Display name."""
        where = f"in namespace {self.namespace}" if self.namespace else "in all namespaces"
        return f"{self.resource.title} {where}"

    def covers(self, resource: ResourceType, namespace: str) -> bool:
        """Returns True if it holds the objects of a resource in a namespace that pools need."""
        return self.resource == resource and self.namespace in {"", namespace}


def check_sources(sources: Sequence[settings.KubernetesSource]) -> None:
    """Rejects sources that contradict each other.

    Raises:
        ConfigError: For two pools of one name, a selector of nothing, too many ports or an unknown
            API group.
    """
    keys: set[str] = set()
    for at, source in enumerate(sources):
        where = f"kubernetes.sources[{at}]"
        if isinstance(source, settings.PodSelector):
            _check_selector(source, where)
        elif not isinstance(source, settings.ServiceRef) and source.group not in POOLS_OF:
            raise ConfigError(
                where,
                wanted="an InferencePool of " + " or ".join(POOLS_OF),
                got=source.group,
                fix="correct the group",
            )
        if isinstance(source, settings.AllPools):
            continue
        if source.key in keys:
            raise ConfigError(
                where, wanted="one pool per name", got=f"{source.key} again", fix="rename one"
            )
        keys.add(source.key)


def _check_selector(source: settings.PodSelector, where: str) -> None:
    if not (source.labels or source.expressions):
        raise ConfigError(
            where,
            wanted="at least one label",
            got="none, which would take every pod",
            fix="name the labels of the engines",
        )
    distinct = len(set(source.ports)) == len(source.ports) <= settings.MAX_PORTS
    if not distinct or not all(1 <= port <= 65535 for port in source.ports):
        raise ConfigError(
            where,
            wanted=f"at most {settings.MAX_PORTS} different ports from 1 to 65535",
            got=", ".join(map(str, source.ports)),
            fix="correct the target ports",
        )


def plan_watches(
    sources: Sequence[settings.KubernetesSource], *, policies: bool
) -> tuple[WatchedCollection, ...]:
    """Plans the collections to watch; no two of them hold the same object."""
    pools = [source for source in sources if isinstance(source, settings.InferencePoolRef)]
    wide = [source for source in sources if isinstance(source, settings.AllPools)]
    selectors = [source for source in sources if isinstance(source, settings.PodSelector)]
    services = [source for source in sources if isinstance(source, settings.ServiceRef)]
    collections: list[WatchedCollection] = []
    for group, resource in POOLS_OF.items():
        names: dict[str, set[str]] = {
            source.namespace: set() for source in wide if source.group == group
        }
        for ref in pools:
            if ref.group == group and ref.namespace not in names:
                names[ref.namespace] = {
                    pool.name
                    for pool in pools
                    if (pool.group, pool.namespace) == (group, ref.namespace)
                }
        collections += [
            WatchedCollection(resource, namespace, fields=_name_selector(only))
            for namespace, only in _drop_covered(names).items()
        ]
    namespaces = dict.fromkeys(
        [source.namespace for source in wide] + [source.namespace for source in pools], ""
    )
    if policies:
        policy_resources = [resource for kind in POLICY_RESOURCES for resource in kind]
        collections += [
            WatchedCollection(resource, namespace)
            for resource in policy_resources
            for namespace in _drop_covered(namespaces)
        ]
    for selector in selectors:
        single_objects = (
            sum(candidate.namespace == selector.namespace for candidate in selectors) == 1
        )
        namespaces.setdefault(
            selector.namespace,
            _label_selector(selector.labels, selector.expressions) if single_objects else "",
        )
    collections += [
        WatchedCollection(PODS, namespace, labels=labels)
        for namespace, labels in _drop_covered(namespaces).items()
    ]
    collections += [
        WatchedCollection(
            SLICES,
            service.namespace,
            labels=_label_selector({"kubernetes.io/service-name": service.name}),
        )
        for service in services
    ]
    return tuple(collections)


def _drop_covered(namespaces: Mapping[str, _T]) -> Mapping[str, _T]:
    """Drops the namespaces if the cluster-wide collection is watched."""
    return {"": namespaces[""]} if "" in namespaces else namespaces


def _name_selector(names: set[str]) -> str:
    """Field selector for one name, so that a Role may be limited to it by resourceNames."""
    return f"metadata.name={next(iter(names))}" if len(names) == 1 else ""


def _label_selector(labels: Mapping[str, str], expressions: Sequence[LabelExpression] = ()) -> str:
    pairs = [f"{key}={text}" for key, text in sorted(labels.items())]
    return ",".join([*pairs, *map(str, expressions)])


#: States of a watch. `connected`: listed, and its changes arrive. The next three are about the
#: server itself, the others about a single collection.
CONNECTED = "connected"
DISCONNECTED = ("disconnected", "unauthorized", "misconfigured")
STATES = ("unknown", CONNECTED, *DISCONNECTED, "forbidden", "not-installed", "unreadable")


class WatchStatus(msgspec.Struct, frozen=True):
    """Status of one watch.

    Attributes:
        state: One of `STATES`; `unknown` before the first answer.
        detail: Reason of the state, for people; empty while it is connected.
        unsynced_since: Monotonic seconds of the last moment in step with the server, or of the
            start where there was none; None while it is in step.
    """

    collection: WatchedCollection
    state: str
    detail: str
    unsynced_since: float | None

    @property
    def is_unsynced(self) -> bool:
        """True if its pools are stale; a missing optional resource does not count."""
        missing = self.state == "not-installed" and self.collection.resource.optional
        return self.state != CONNECTED and not missing


class WatchStatuses:
    """Status of all watches."""

    def __init__(self, collections: Iterable[WatchedCollection], now: float) -> None:
        self._statuses = {
            collection: WatchStatus(collection, "unknown", "", now) for collection in collections
        }
        #: The state of the server itself that was reported last; empty while it answers.
        self._away = ""
        #: Whether a fault was reported and its end was not.
        self._faulty = False

    @property
    def statuses(self) -> tuple[WatchStatus, ...]:
        """Status of all watches."""
        return tuple(self._statuses.values())

    def update(
        self, collection: WatchedCollection, state: str, detail: str, *, server: str, now: float
    ) -> Iterator[tuple[str, str]]:
        """Records the state that a reflector reported.

        Args:
            state: One of `STATES`.
            server: Address of the API server, for people.

        Yields:
            Kind and detail of what is worth a log line: every change of the reason, once, and not
            once per collection where the server itself is the reason.
        """
        before = self._statuses[collection]
        since = before.unsynced_since if before.unsynced_since is not None else now
        self._statuses[collection] = WatchStatus(
            collection, state, detail, None if state == CONNECTED else since
        )
        if state == before.state:
            return
        if state in DISCONNECTED:
            if state != self._away:
                self._away = state
                self._faulty = True
                yield state, f"{server}: {detail}"
        elif state not in {CONNECTED, "not-installed"} or (
            state == "not-installed" and not collection.resource.optional
        ):
            self._faulty = self._faulty or state != "not-installed"
            yield state, detail
        yield from self._ended(state, server)

    def _ended(self, latest: str, server: str) -> Iterator[tuple[str, str]]:
        """Describes the end of an outage: the server answers again, for all or for some."""
        states = [status.state for status in self._statuses.values()]
        if any(state in DISCONNECTED for state in states):
            return
        away, self._away = self._away, ""
        forbidden = [
            status.collection.title
            for status in self._statuses.values()
            if status.state == "forbidden"
        ]
        if forbidden:
            if away and latest != "forbidden":
                yield "forbidden", f"{server} answers again, but not for {', '.join(forbidden)}"
        elif self._faulty and "unreadable" not in states:
            self._faulty = False
            yield CONNECTED, server


def describe_statuses(statuses: Iterable[WatchStatus], now: float) -> Iterator[str]:
    """Describes every watch whose pools are stale, for how long, and why."""
    for status in statuses:
        if status.is_unsynced and status.unsynced_since is not None:
            why = f"{status.state}: {status.detail}" if status.detail else status.state
            seconds = round(now - status.unsynced_since)
            yield f"{status.collection.title} not in step for {seconds} s: {why}"
