"""ADS sessions: state of the world, and delta, in which responses carry changes only.

For each type at most one answer is under way: what changes meanwhile goes out with the next one,
once Envoy has said what it thinks of the last. A state-of-the-world request that answers an older
answer says nothing new (its successor is on the way with the same subscriptions) and is passed over.

The protocol: the xDS REST and gRPC protocol of Envoy's documentation, `ACK/NACK and resource type
instance version` and `Incremental xDS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import msgspec
import xxhash

from extproc.xds import resources
from extproc.xds.resources import XdsResource, XdsSnapshot

#: Every resource of a type.
WILDCARD = "*"


class SotwRequest(msgspec.Struct, frozen=True):
    """Decoded `DiscoveryRequest`.

    Attributes:
        type_url: Of which type.
        names: All it subscribes to.
        nonce: Of the answer this one is about, empty for none.
        error: Why it refused that answer, empty if it did not.
    """

    type_url: str
    names: tuple[str, ...] = ()
    nonce: str = ""
    error: str = ""


class SotwResponse(msgspec.Struct, frozen=True):
    """Response to send as a `DiscoveryResponse`.

    Attributes:
        type_url: Of which type.
        version: Of these resources together.
        nonce: By which the peer refers to it.
        resources: All of the type that are subscribed to.
    """

    type_url: str
    version: str
    nonce: str
    resources: tuple[XdsResource, ...]


class Nack(msgspec.Struct, frozen=True):
    """Rejection of a response by Envoy.

    Attributes:
        type_url: Of which type.
        version: Of the answer.
        error: Message of Envoy.
    """

    type_url: str
    version: str
    error: str


#: Versions by name.
_Contents = Mapping[str, str]


class _TypeState:
    """State of one resource type on one stream.

    Attributes:
        names: What is subscribed to.
        wildcard: Whether it is everything.
        nonce: Of the last answer.
        version: Of the last answer.
        under_way: What was sent and neither taken nor refused.
        held: What was taken last; None before.
        refused: What was refused since; None for nothing.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.wildcard = False
        self.nonce = ""
        self.version = ""
        self.under_way: _Contents | None = None
        self.held: _Contents | None = None
        self.refused: _Contents | None = None

    def subscribe(self, names: tuple[str, ...], *, lists_all: bool) -> None:
        """Replaces the subscription.

        No names at all mean everything, for types that can be listed and while none were named.
        """
        self.wildcard = WILDCARD in names or (lists_all and not names and not self.names)
        self.names = frozenset(names) - {WILDCARD}
        if self.held is not None and not self.wildcard:
            # What is no longer subscribed to is forgotten, and wanted again if it comes back.
            self.held = {name: self.held[name] for name in self.held if name in self.names}

    def settle(self, error: str) -> None:
        """Records the ACK or NACK of the response in flight."""
        if error:
            self.refused = self.under_way
        else:
            self.held, self.refused = self.under_way, None
        self.under_way = None

    def wanted(self, known: Mapping[str, XdsResource]) -> dict[str, XdsResource]:
        """Returns the existing resources that are subscribed to."""
        if self.wildcard:
            return dict(known)
        return {name: resource for name, resource in known.items() if name in self.names}


class SotwSession:
    """Session of one state-of-the-world stream."""

    def __init__(self) -> None:
        self._snapshot: XdsSnapshot | None = None
        self._topics: dict[str, _TypeState] = {}
        self._nonces = itertools.count(1)

    def request(self, request: SotwRequest) -> tuple[SotwResponse | Nack, ...]:
        """Handles a request of Envoy; returns the replies, a NACK first."""
        if request.type_url not in (resources.CLUSTER, resources.ASSIGNMENT):
            return ()
        topic = self._topics.get(request.type_url)
        if topic is None:
            topic = self._topics[request.type_url] = _TypeState()
        elif request.nonce != topic.nonce:
            return ()
        answers = topic.under_way is not None
        replies: list[SotwResponse | Nack] = []
        if answers:
            topic.settle(request.error)
            if request.error:
                replies.append(Nack(request.type_url, topic.version, request.error))
        topic.subscribe(request.names, lists_all=request.type_url == resources.CLUSTER)
        # Asked again with nothing under way: Envoy may be warming a cluster anew and wait for its
        # endpoints, although it has had them, even when it asks for fewer than before.
        replies.extend(self._offer(request.type_url, topic, again=not answers))
        return tuple(replies)

    def publish(self, snapshot: XdsSnapshot) -> tuple[SotwResponse, ...]:
        """Publishes a snapshot; returns responses, clusters before endpoints."""
        self._snapshot = snapshot
        return tuple(
            response
            for type_url in (resources.CLUSTER, resources.ASSIGNMENT)
            if (topic := self._topics.get(type_url)) is not None
            for response in self._offer(type_url, topic)
        )

    def _offer(
        self, type_url: str, topic: _TypeState, *, again: bool = False
    ) -> Iterator[SotwResponse]:
        if self._snapshot is None or topic.under_way is not None:
            return
        wanted = topic.wanted(self._snapshot[type_url])
        contents = {name: resource.version for name, resource in wanted.items()}
        if contents == topic.refused or (contents == topic.held and not again):
            return
        if not contents and type_url == resources.ASSIGNMENT:
            # Endpoints cannot be taken back this way, only their cluster can.
            return
        topic.under_way = contents
        topic.nonce = str(next(self._nonces))
        topic.version = _digest(contents)
        yield SotwResponse(type_url, topic.version, topic.nonce, tuple(wanted.values()))


def _digest(contents: _Contents) -> str:
    text = "".join(f"{name}={contents[name]};" for name in sorted(contents))
    return xxhash.xxh3_64_hexdigest(text.encode())


class DeltaRequest(msgspec.Struct, frozen=True):
    """Decoded `DeltaDiscoveryRequest`.

    Attributes:
        type_url: Of which type.
        subscribe: Names it wants from now on.
        unsubscribe: Names it no longer wants.
        held: Versions by name that it still has from an earlier stream; first request only.
        nonce: Of the answer this one is about, empty for none.
        error: Why it refused that answer, empty if it did not.
    """

    type_url: str
    subscribe: tuple[str, ...] = ()
    unsubscribe: tuple[str, ...] = ()
    held: Mapping[str, str] = {}
    nonce: str = ""
    error: str = ""


class DeltaResponse(msgspec.Struct, frozen=True):
    """Response to send as a `DeltaDiscoveryResponse`.

    Attributes:
        type_url: Of which type.
        nonce: By which the peer refers to it.
        resources: New ones and others than before.
        removed: Names that are no more.
    """

    type_url: str
    nonce: str
    resources: tuple[XdsResource, ...]
    removed: tuple[str, ...]


#: Stands for a resource that does not exist.
_ABSENT = ""


class _DeltaTypeState:
    """State of one resource type on one stream.

    Attributes:
        names: What is subscribed to by name.
        wildcard: Whether everything is.
        nonce: Of the answer under way; empty for none.
        under_way: Versions it holds, absent ones included.
        held: What Envoy is known to hold, or to know as absent.
        refused: What was refused since, by name.
        isolate_next: Versions refused together with others: each is sent alone, to find the bad
            one.
    """

    def __init__(self, first: DeltaRequest, *, lists_all: bool) -> None:
        self.names: set[str] = set()
        self.wildcard = lists_all and not first.subscribe
        self.nonce = ""
        self.under_way: Mapping[str, str] = {}
        self.held: dict[str, str] = dict(first.held)
        self.refused: dict[str, str] = {}
        self.isolate_next: dict[str, str] = {}

    def subscribe(self, request: DeltaRequest) -> None:
        """Applies subscription changes; a name subscribed to again is sent again."""
        for name in request.subscribe:
            if name == WILDCARD:
                self.wildcard = True
                continue
            self.names.add(name)
            # What an earlier stream left there is only confirmed; otherwise it was lost or warms.
            if name not in request.held:
                self.held.pop(name, None)
                self.refused.pop(name, None)
        for name in request.unsubscribe:
            if name == WILDCARD:
                self.wildcard = False
            self.names.discard(name)
        if not self.wildcard:
            self.held = {name: version for name, version in self.held.items() if name in self.names}

    def settle(self, error: str) -> None:
        """Records the ACK or NACK of the response in flight."""
        if error:
            bad = self.refused if len(self.under_way) == 1 else self.isolate_next
            bad.update(self.under_way)
        else:
            for name, version in self.under_way.items():
                self.held[name] = version
                self.refused.pop(name, None)
                self.isolate_next.pop(name, None)
        self.nonce, self.under_way = "", {}

    def pending_changes(self, known: Mapping[str, XdsResource]) -> dict[str, str]:
        """Returns versions of the resources to send next, by name."""
        named = [*known, *(self.held.keys() - known.keys())] if self.wildcard else []
        changed = {}
        for name in (*named, *sorted(self.names.difference(named))):
            version = known[name].version if name in known else _ABSENT
            if self.held.get(name) != version and self.refused.get(name) != version:
                changed[name] = version
        clean = {
            name: version
            for name, version in changed.items()
            if self.isolate_next.get(name) != version
        }
        return clean or dict(itertools.islice(changed.items(), 1))


class DeltaSession:
    """Session of one delta stream."""

    def __init__(self) -> None:
        self._snapshot: XdsSnapshot | None = None
        self._topics: dict[str, _DeltaTypeState] = {}
        self._nonces = itertools.count(1)

    def request(self, request: DeltaRequest) -> tuple[DeltaResponse | Nack, ...]:
        """Handles a request of Envoy; returns the replies, a NACK first."""
        if request.type_url not in (resources.CLUSTER, resources.ASSIGNMENT):
            return ()
        topic = self._topics.get(request.type_url)
        new = topic is None
        if topic is None:
            lists_all = request.type_url == resources.CLUSTER
            topic = self._topics[request.type_url] = _DeltaTypeState(request, lists_all=lists_all)
        replies: list[DeltaResponse | Nack] = []
        if request.nonce and request.nonce == topic.nonce:
            topic.settle(request.error)
            if request.error:
                replies.append(Nack(request.type_url, request.nonce, request.error))
        topic.subscribe(request)
        replies.extend(self._offer(request.type_url, topic, always=new and topic.wildcard))
        return tuple(replies)

    def publish(self, snapshot: XdsSnapshot) -> tuple[DeltaResponse, ...]:
        """Publishes a snapshot; returns responses, clusters before endpoints."""
        first = self._snapshot is None
        self._snapshot = snapshot
        return tuple(
            response
            for type_url in (resources.CLUSTER, resources.ASSIGNMENT)
            if (topic := self._topics.get(type_url)) is not None
            for response in self._offer(type_url, topic, always=first and topic.wildcard)
        )

    def _offer(
        self, type_url: str, topic: _DeltaTypeState, *, always: bool = False
    ) -> Iterator[DeltaResponse]:
        if self._snapshot is None or topic.nonce:
            return
        known = self._snapshot[type_url]
        news = topic.pending_changes(known)
        # Envoy waits for the first answer to a wildcard even if it holds nothing.
        if not news and not always:
            return
        topic.under_way = news
        topic.nonce = str(next(self._nonces))
        yield DeltaResponse(
            type_url,
            topic.nonce,
            tuple(known[name] for name, version in news.items() if version != _ABSENT),
            tuple(name for name, version in news.items() if version == _ABSENT),
        )
