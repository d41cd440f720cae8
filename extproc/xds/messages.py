"""Decoding of discovery requests and encoding of responses (`envoy-data-plane`).

Reading is total: what cannot be read is None, because a decoder that raises ends the stream with
an error without a remedy.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import betterproto2
import msgspec

from extproc.xds import sessions
from extproc.xds.resources import XdsResource, XdsSnapshot
from extproc.xds.sessions import Nack

with warnings.catch_warnings():
    # pydantic deprecates a validator style that the generated classes use.
    warnings.filterwarnings("ignore", message=r"Using `@model_validator`")
    from envoy_data_plane.envoy.service.discovery import v3 as discovery_v3
    from envoy_data_plane.google.protobuf import Any

#: Field of `node` in both requests, and of the name in it. Envoy's lists all its extensions, 70 ms
#: of parsing in the loop that picks; only the name is wanted.
_NODE = {"whole": 2, "differences": 1}
_NODE_ID = 1


class EncodedResponse(msgspec.Struct, frozen=True):
    """One encoded response."""

    type_url: str
    data: bytes


class RequestResult(msgspec.Struct, frozen=True):
    """Result of one request.

    Attributes:
        node: Node id of Envoy, set in the first request of a stream; empty where not set.
        nack: NACK of the previous response; None for none.
        responses: Encoded responses to send.
    """

    node: str
    nack: Nack | None
    responses: tuple[EncodedResponse, ...]


class SessionCodec(Protocol):
    """Session of one stream, over encoded messages."""

    def handle_request(self, data: bytes) -> RequestResult | None:
        """Handles an encoded request; None if it cannot be decoded."""

    def publish(self, snapshot: XdsSnapshot) -> tuple[EncodedResponse, ...]:
        """Publishes a snapshot; returns encoded responses."""


class SotwCodec:
    """Session of a state-of-the-world stream: `StreamAggregatedResources`."""

    def __init__(self) -> None:
        self._session = sessions.SotwSession()

    def handle_request(self, data: bytes) -> RequestResult | None:
        """Handles an encoded `DiscoveryRequest`; None if it cannot be decoded."""
        decoded = decode_sotw_request(data)
        if decoded is None:
            return None
        node, request = decoded
        replies = self._session.request(request)
        nack = next((reply for reply in replies if isinstance(reply, Nack)), None)
        responses = [reply for reply in replies if isinstance(reply, sessions.SotwResponse)]
        return RequestResult(node, nack, tuple(map(_sotw_message, responses)))

    def publish(self, snapshot: XdsSnapshot) -> tuple[EncodedResponse, ...]:
        """Publishes a snapshot; returns encoded responses."""
        return tuple(map(_sotw_message, self._session.publish(snapshot)))


class DeltaCodec:
    """Session of a delta stream: `DeltaAggregatedResources`."""

    def __init__(self) -> None:
        self._session = sessions.DeltaSession()

    def handle_request(self, data: bytes) -> RequestResult | None:
        """Handles an encoded `DeltaDiscoveryRequest`; None if it cannot be decoded."""
        decoded = decode_delta_request(data)
        if decoded is None:
            return None
        node, request = decoded
        replies = self._session.request(request)
        nack = next((reply for reply in replies if isinstance(reply, Nack)), None)
        responses = [reply for reply in replies if isinstance(reply, sessions.DeltaResponse)]
        return RequestResult(node, nack, tuple(map(_delta_message, responses)))

    def publish(self, snapshot: XdsSnapshot) -> tuple[EncodedResponse, ...]:
        """Publishes a snapshot; returns encoded responses."""
        return tuple(map(_delta_message, self._session.publish(snapshot)))


def decode_sotw_request(data: bytes) -> tuple[str, sessions.SotwRequest] | None:
    """Decodes a `DiscoveryRequest` into node id and request; None if it cannot be decoded."""
    try:
        node, rest = _split_node(data, _NODE["whole"])
        message = discovery_v3.DiscoveryRequest.parse(rest)
    except Exception:  # noqa: BLE001  whatever a parser raises at garbage
        return None
    request = sessions.SotwRequest(
        message.type_url, tuple(message.resource_names), message.response_nonce, _error(message)
    )
    return node, request


def decode_delta_request(data: bytes) -> tuple[str, sessions.DeltaRequest] | None:
    """Decodes a `DeltaDiscoveryRequest` into node id and request; None if it cannot be decoded."""
    try:
        node, rest = _split_node(data, _NODE["differences"])
        message = discovery_v3.DeltaDiscoveryRequest.parse(rest)
    except Exception:  # noqa: BLE001  whatever a parser raises at garbage
        return None
    request = sessions.DeltaRequest(
        message.type_url,
        tuple(message.resource_names_subscribe),
        tuple(message.resource_names_unsubscribe),
        dict(message.initial_resource_versions),
        message.response_nonce,
        _error(message),
    )
    return node, request


def _sotw_message(response: sessions.SotwResponse) -> EncodedResponse:
    data = bytes(
        discovery_v3.DiscoveryResponse(
            version_info=response.version,
            type_url=response.type_url,
            nonce=response.nonce,
            resources=[_any(response.type_url, resource) for resource in response.resources],
        )
    )
    return EncodedResponse(response.type_url, data)


def _delta_message(response: sessions.DeltaResponse) -> EncodedResponse:
    data = bytes(
        discovery_v3.DeltaDiscoveryResponse(
            type_url=response.type_url,
            nonce=response.nonce,
            resources=[
                discovery_v3.Resource(
                    name=resource.name,
                    version=resource.version,
                    resource=_any(response.type_url, resource),
                )
                for resource in response.resources
            ],
            removed_resources=list(response.removed),
        )
    )
    return EncodedResponse(response.type_url, data)


def _any(type_url: str, resource: XdsResource) -> Any:
    return Any(type_url=type_url, value=resource.body)


def _error(request: discovery_v3.DiscoveryRequest | discovery_v3.DeltaDiscoveryRequest) -> str:
    """Returns the reason of a NACK, never empty for one; empty for an ACK."""
    status = request.error_detail
    return "" if status is None else status.message or f"code {status.code}"


def _split_node(data: bytes, number: int) -> tuple[str, bytes]:
    """Splits a request into the node id and the rest."""
    fields = list(betterproto2.parse_fields(data))
    rest = b"".join(field.raw for field in fields if field.number != number)
    nodes: Sequence[bytes] = [field.value for field in fields if field.number == number]
    names = [
        field.value.decode()
        for node in nodes
        for field in betterproto2.parse_fields(node)
        if field.number == _NODE_ID
    ]
    return "".join(names), rest
