"""Delta (incremental) xDS sessions: responses carry changes since the last one.

As in `sotw`, at most one answer of a type is under way. The protocol: the xDS REST and gRPC
protocol of Envoy's documentation, `Incremental xDS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import msgspec

from extproc.xds import resources
from extproc.xds.resources import XdsResource, XdsSnapshot
from extproc.xds.sotw import WILDCARD, Nack


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
