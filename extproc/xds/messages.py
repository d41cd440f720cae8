"""Decoding of discovery requests and encoding of responses.

Reading is total: what cannot be read is None, because a decoder that raises ends the stream with
an error without a remedy.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from extproc.wire.pb import xds_pb2
from extproc.xds import sessions
from extproc.xds.resources import XdsResource, XdsSnapshot
from extproc.xds.sessions import Nack


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
        message = xds_pb2.DiscoveryRequest.FromString(data)
    except Exception:  # noqa: BLE001  only wire knows protobuf's DecodeError
        return None
    request = sessions.SotwRequest(
        message.type_url, tuple(message.resource_names), message.response_nonce, _error(message)
    )
    return message.node.id, request


def decode_delta_request(data: bytes) -> tuple[str, sessions.DeltaRequest] | None:
    """Decodes a `DeltaDiscoveryRequest` into node id and request; None if it cannot be decoded."""
    try:
        message = xds_pb2.DeltaDiscoveryRequest.FromString(data)
    except Exception:  # noqa: BLE001  only wire knows protobuf's DecodeError
        return None
    request = sessions.DeltaRequest(
        message.type_url,
        tuple(message.resource_names_subscribe),
        tuple(message.resource_names_unsubscribe),
        dict(message.initial_resource_versions),
        message.response_nonce,
        _error(message),
    )
    return message.node.id, request


def _sotw_message(response: sessions.SotwResponse) -> EncodedResponse:
    message = xds_pb2.DiscoveryResponse(
        version_info=response.version,
        type_url=response.type_url,
        nonce=response.nonce,
        resources=[_any(response.type_url, resource) for resource in response.resources],
    )
    return EncodedResponse(response.type_url, message.SerializeToString())


def _delta_message(response: sessions.DeltaResponse) -> EncodedResponse:
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
