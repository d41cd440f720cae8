"""ADS sessions: state of the world, and delta, in which responses carry changes only.

For each type at most one answer is under way: what changes meanwhile goes out with the next one,
once Envoy has said what it thinks of the last. A state-of-the-world request that answers an older
answer says nothing new (its successor is on the way with the same subscriptions) and is passed over.

The protocol: the xDS REST and gRPC protocol of Envoy's documentation, `ACK/NACK and resource type
instance version` and `Incremental xDS`. Decoding is total: what cannot be read is None, because a decoder
that raises ends the stream with an error without a remedy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import xxhash

from extproc.wire.pb import xds_pb2
from extproc.xds import resources
from extproc.xds.resources import XdsResource, XdsSnapshot

#: Every resource of a type.
WILDCARD = "*"

#: Names that one stream may subscribe to by differences, of which requests add up (count).
MAX_NAMES = 16_384


class SotwRequest(msgspec.Struct, frozen=True):
    """Decoded `DiscoveryRequest`.

    Attributes:
        names: Complete list of subscribed names.
        nonce: Nonce of the response that it acknowledges or rejects; empty for none.
        error: Error of a NACK; empty for an ACK.
    """

    type_url: str
    names: tuple[str, ...] = ()
    nonce: str = ""
    error: str = ""


class SotwResponse(msgspec.Struct, frozen=True):
    """Response to send as a `DiscoveryResponse`.

    Attributes:
        version: Combined version of these resources.
        nonce: Identity of the response, which the ACK or NACK repeats.
        resources: All subscribed resources of the type.
    """

    type_url: str
    version: str
    nonce: str
    resources: tuple[XdsResource, ...]


class Nack(msgspec.Struct, frozen=True):
    """Rejection of a response by Envoy.

    Attributes:
        version: Version or nonce of the rejected response.
    """

    type_url: str
    version: str
    error: str


#: Versions by name.
_Versions = Mapping[str, str]


class _SotwTypeState:
    """State of one resource type on one stream.

    Attributes:
        wildcard: True if it subscribed to all of them.
        in_flight: Resources that were sent, and neither acknowledged nor rejected.
        acked: Resources that were acknowledged last; None before.
        nacked: Resources that were rejected since; None for none.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.wildcard = False
        self._has_named = False
        self.nonce = ""
        self.version = ""
        self.in_flight: _Versions | None = None
        self.acked: _Versions | None = None
        self.nacked: _Versions | None = None

    def subscribe(self, names: tuple[str, ...], *, lists_all: bool) -> None:
        """Replaces the subscription.

        No names at all mean everything, for types that can be listed and while none were named.
        """
        self._has_named = self._has_named or bool(names)
        self.wildcard = WILDCARD in names or (lists_all and not self._has_named)
        self.names = frozenset(names) - {WILDCARD}
        if self.acked is not None and not self.wildcard:
            # What is no longer subscribed to is forgotten, and subscribed again if it comes back.
            self.acked = {name: self.acked[name] for name in self.acked if name in self.names}

    def acknowledge(self, error: str) -> None:
        """Records the ACK or NACK of the response in flight."""
        if error:
            self.nacked = self.in_flight
        else:
            self.acked, self.nacked = self.in_flight, None
        self.in_flight = None

    def select_subscribed(self, available: Mapping[str, XdsResource]) -> dict[str, XdsResource]:
        """Returns the existing resources that are subscribed to."""
        if self.wildcard:
            return dict(available)
        return {name: resource for name, resource in available.items() if name in self.names}


class SotwSession:
    """Session of one state-of-the-world stream."""

    def __init__(self) -> None:
        self._snapshot: XdsSnapshot | None = None
        self._type_states: dict[str, _SotwTypeState] = {}
        self._nonces = itertools.count(1)

    def request(self, request: SotwRequest) -> tuple[SotwResponse | Nack, ...]:
        """Handles a request of Envoy; returns the replies, a NACK first."""
        if request.type_url not in (resources.CLUSTER, resources.ASSIGNMENT):
            return ()
        state = self._type_states.get(request.type_url)
        if state is None:
            state = self._type_states[request.type_url] = _SotwTypeState()
        elif request.nonce != state.nonce:
            return ()
        is_answer = state.in_flight is not None
        replies: list[SotwResponse | Nack] = []
        if is_answer:
            state.acknowledge(request.error)
            if request.error:
                replies.append(Nack(request.type_url, state.version, request.error))
        state.subscribe(request.names, lists_all=request.type_url == resources.CLUSTER)
        # Asked again with nothing under way: Envoy may be warming a cluster anew and wait for its
        # endpoints, although it has had them, even when it asks for fewer than before.
        replies.extend(self._respond(request.type_url, state, again=not is_answer))
        return tuple(replies)

    def publish(self, snapshot: XdsSnapshot) -> tuple[SotwResponse, ...]:
        """Publishes a snapshot; returns responses, clusters before endpoints."""
        self._snapshot = snapshot
        return tuple(
            response
            for type_url in (resources.CLUSTER, resources.ASSIGNMENT)
            if (state := self._type_states.get(type_url)) is not None
            for response in self._respond(type_url, state)
        )

    def _respond(
        self, type_url: str, state: _SotwTypeState, *, again: bool = False
    ) -> Iterator[SotwResponse]:
        if self._snapshot is None or state.in_flight is not None:
            return
        subscribed = state.select_subscribed(self._snapshot[type_url])
        versions = {name: resource.version for name, resource in subscribed.items()}
        if versions == state.nacked or (versions == state.acked and not again):
            return
        if not versions and type_url == resources.ASSIGNMENT:
            # Endpoints cannot be taken back this way, only their cluster can.
            return
        state.in_flight = versions
        state.nonce = str(next(self._nonces))
        state.version = combined_version(versions)
        yield SotwResponse(type_url, state.version, state.nonce, tuple(subscribed.values()))


def combined_version(versions: _Versions) -> str:
    """Version of a response, from the versions of its resources by name."""
    text = "".join(f"{name}={versions[name]};" for name in sorted(versions))
    return xxhash.xxh3_64_hexdigest(text.encode())


class DeltaRequest(msgspec.Struct, frozen=True):
    """Decoded `DeltaDiscoveryRequest`.

    Attributes:
        subscribe: Names it wants from now on.
        unsubscribe: Names it no longer wants.
        initial_versions: Versions by name that it still has from an earlier stream; first request only.
        nonce: Nonce of the response that it acknowledges or rejects; empty for none.
        error: Error of a NACK; empty for an ACK.
    """

    type_url: str
    subscribe: tuple[str, ...] = ()
    unsubscribe: tuple[str, ...] = ()
    initial_versions: Mapping[str, str] = {}
    nonce: str = ""
    error: str = ""


class DeltaResponse(msgspec.Struct, frozen=True):
    """Response to send as a `DeltaDiscoveryResponse`.

    Attributes:
        nonce: Identity of the response, which the ACK or NACK repeats.
        resources: New and changed resources.
    """

    type_url: str
    nonce: str
    resources: tuple[XdsResource, ...]
    removed: tuple[str, ...]


#: Stands for a resource that does not exist.
_ABSENT = ""

#: Stands for a resource of which Envoy cannot know whether it still has it; no version is like it.
_UNKNOWN = "?"


class _DeltaTypeState:
    """State of one resource type on one stream.

    Attributes:
        wildcard: True if it subscribed to all of them.
        nonce: Nonce of the response in flight; empty for none.
        in_flight: Versions of that response by name, absent resources included.
        acked: Versions that Envoy acknowledged by name, absent resources included.
        nacked: Versions that Envoy rejected since, by name.
        isolate_next: Versions refused together with others: each is sent alone, to find the bad
            one.
    """

    def __init__(self, first: DeltaRequest, *, lists_all: bool) -> None:
        self.names: set[str] = set()
        self.wildcard = lists_all and not first.subscribe
        self.nonce = ""
        self.in_flight: Mapping[str, str] = {}
        self.acked: dict[str, str] = dict(first.initial_versions)
        self.nacked: dict[str, str] = {}
        self.isolate_next: dict[str, str] = {}

    def subscribe(self, request: DeltaRequest) -> None:
        """Applies subscription changes; a name subscribed to again is sent again.

        New names beyond `MAX_NAMES` are ignored.
        """
        for name in request.subscribe:
            if name == WILDCARD:
                self.wildcard = True
                continue
            if len(self.names) < MAX_NAMES:
                self.names.add(name)
            # What an earlier stream left there is only confirmed; otherwise it was lost or warms.
            if name not in request.initial_versions:
                self.acked.pop(name, None)
                self.nacked.pop(name, None)
        if WILDCARD in request.unsubscribe:
            self.wildcard = False
        for name in self.names.intersection(request.unsubscribe):
            self.names.discard(name)
            self._forget(name)
            if self.wildcard:
                # Envoy waits to learn whether the name is one of all.
                self.acked[name] = _UNKNOWN
        if not self.wildcard:
            for name in self.acked.keys() - self.names:
                self._forget(name)

    def acknowledge(self, error: str) -> None:
        """Records the ACK or NACK of the response in flight."""
        is_alone = len(self.in_flight) == 1
        for name, version in self.in_flight.items():
            is_named = name in self.names
            if error and not is_alone and (is_named or self.wildcard):
                self.isolate_next[name] = version
            elif not is_named and (version == _ABSENT or not self.wildcard):
                self._forget(name)
            elif error:
                self.nacked[name] = version
            else:
                self._forget(name)
                self.acked[name] = version
        self.nonce, self.in_flight = "", {}

    def _forget(self, name: str) -> None:
        for versions in (self.acked, self.nacked, self.isolate_next):
            versions.pop(name, None)

    def pending_changes(self, available: Mapping[str, XdsResource]) -> dict[str, str]:
        """Returns versions of the resources to send next, by name."""
        named = [*available, *(self.acked.keys() - available.keys())] if self.wildcard else []
        changed = {}
        for name in (*named, *sorted(self.names.difference(named))):
            version = available[name].version if name in available else _ABSENT
            if self.acked.get(name) != version and self.nacked.get(name) != version:
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
        self._type_states: dict[str, _DeltaTypeState] = {}
        self._nonces = itertools.count(1)

    def request(self, request: DeltaRequest) -> tuple[DeltaResponse | Nack, ...]:
        """Handles a request of Envoy; returns the replies, a NACK first."""
        if request.type_url not in (resources.CLUSTER, resources.ASSIGNMENT):
            return ()
        state = self._type_states.get(request.type_url)
        is_new = state is None
        if state is None:
            lists_all = request.type_url == resources.CLUSTER
            state = self._type_states[request.type_url] = _DeltaTypeState(
                request, lists_all=lists_all
            )
        replies: list[DeltaResponse | Nack] = []
        if request.nonce and request.nonce == state.nonce:
            state.acknowledge(request.error)
            if request.error:
                replies.append(Nack(request.type_url, request.nonce, request.error))
        state.subscribe(request)
        replies.extend(self._respond(request.type_url, state, always=is_new and state.wildcard))
        return tuple(replies)

    def publish(self, snapshot: XdsSnapshot) -> tuple[DeltaResponse, ...]:
        """Publishes a snapshot; returns responses, clusters before endpoints."""
        is_first = self._snapshot is None
        self._snapshot = snapshot
        return tuple(
            response
            for type_url in (resources.CLUSTER, resources.ASSIGNMENT)
            if (state := self._type_states.get(type_url)) is not None
            for response in self._respond(type_url, state, always=is_first and state.wildcard)
        )

    def _respond(
        self, type_url: str, state: _DeltaTypeState, *, always: bool = False
    ) -> Iterator[DeltaResponse]:
        if self._snapshot is None or state.nonce:
            return
        available = self._snapshot[type_url]
        changes = state.pending_changes(available)
        # Envoy waits for the first answer to a wildcard even if it holds nothing.
        if not changes and not always:
            return
        state.in_flight = changes
        state.nonce = str(next(self._nonces))
        yield DeltaResponse(
            type_url,
            state.nonce,
            tuple(available[name] for name, version in changes.items() if version != _ABSENT),
            tuple(name for name, version in changes.items() if version == _ABSENT),
        )


class EncodedResponse(msgspec.Struct, frozen=True):
    """One encoded response."""

    type_url: str
    data: bytes


class RequestResult(msgspec.Struct, frozen=True):
    """Result of one request.

    Attributes:
        node: Node id of Envoy, set in the first request of a stream; empty where not set.
        nack: NACK of the previous response; None for none.
    """

    node: str
    nack: Nack | None
    responses: tuple[EncodedResponse, ...]


class SessionCodec:
    """Session of one stream, over encoded messages.

    Args:
        decode: Returns node id and request of a message; None if it cannot be decoded.
        encode: Encodes a response of the session.
    """

    def __init__(
        self,
        session: SotwSession | DeltaSession,
        decode: Callable[[bytes], tuple[str, Any] | None],
        encode: Callable[[Any], EncodedResponse],
    ) -> None:
        self._session = session
        self._decode = decode
        self._encode = encode

    def handle_request(self, data: bytes) -> RequestResult | None:
        """Handles an encoded request; None if it cannot be decoded."""
        decoded = self._decode(data)
        if decoded is None:
            return None
        node, request = decoded
        replies = self._session.request(request)
        nack = next((reply for reply in replies if isinstance(reply, Nack)), None)
        responses = [self._encode(reply) for reply in replies if reply is not nack]
        return RequestResult(node, nack, tuple(responses))

    def publish(self, snapshot: XdsSnapshot) -> tuple[EncodedResponse, ...]:
        """Publishes a snapshot; returns encoded responses."""
        return tuple(map(self._encode, self._session.publish(snapshot)))


def sotw_codec() -> SessionCodec:
    """Session of a state-of-the-world stream: `StreamAggregatedResources`."""
    return SessionCodec(SotwSession(), decode_sotw_request, _sotw_message)


def delta_codec() -> SessionCodec:
    """Session of a delta stream: `DeltaAggregatedResources`."""
    return SessionCodec(DeltaSession(), decode_delta_request, _delta_message)


def decode_sotw_request(data: bytes) -> tuple[str, SotwRequest] | None:
    """Decodes a `DiscoveryRequest` into node id and request; None if it cannot be decoded."""
    try:
        message = xds_pb2.DiscoveryRequest.FromString(data)
    except Exception:  # noqa: BLE001  only wire knows protobuf's DecodeError
        return None
    request = SotwRequest(
        message.type_url, tuple(message.resource_names), message.response_nonce, _error(message)
    )
    return message.node.id, request


def decode_delta_request(data: bytes) -> tuple[str, DeltaRequest] | None:
    """Decodes a `DeltaDiscoveryRequest` into node id and request; None if it cannot be decoded."""
    try:
        message = xds_pb2.DeltaDiscoveryRequest.FromString(data)
    except Exception:  # noqa: BLE001  only wire knows protobuf's DecodeError
        return None
    request = DeltaRequest(
        message.type_url,
        tuple(message.resource_names_subscribe),
        tuple(message.resource_names_unsubscribe),
        dict(message.initial_resource_versions),
        message.response_nonce,
        _error(message),
    )
    return message.node.id, request


def _sotw_message(response: SotwResponse) -> EncodedResponse:
    message = xds_pb2.DiscoveryResponse(
        version_info=response.version,
        type_url=response.type_url,
        nonce=response.nonce,
        resources=[_any(response.type_url, resource) for resource in response.resources],
    )
    return EncodedResponse(response.type_url, message.SerializeToString())


def _delta_message(response: DeltaResponse) -> EncodedResponse:
    message = xds_pb2.DeltaDiscoveryResponse(
        type_url=response.type_url,
        nonce=response.nonce,
        resources=[
            {
                "name": resource.name,
                "version": resource.version,
                "resource": _any(response.type_url, resource),
            }
            for resource in response.resources
        ],
        removed_resources=response.removed,
    )
    return EncodedResponse(response.type_url, message.SerializeToString())


def _any(type_url: str, resource: XdsResource) -> dict[str, object]:
    return {"type_url": type_url, "value": resource.body}


def _error(request: Any) -> str:
    """Returns the reason of a NACK, never empty for one; empty for an ACK."""
    if not request.HasField("error_detail"):
        return ""
    return request.error_detail.message or f"code {request.error_detail.code}"
