"""Messages from Envoy: one frozen value per ext_proc ProcessingRequest."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec


class MessageKind(enum.IntEnum):
    """Kind of a message of an exchange.

    UNKNOWN is one this version does not know and ignores; GARBAGE is none at all.
    """

    # Enum hashes by name, in Python; these are keys on every message.
    __hash__ = int.__hash__

    UNKNOWN = 0
    REQUEST_HEADERS = 1
    REQUEST_BODY = 2
    REQUEST_TRAILERS = 3
    RESPONSE_HEADERS = 4
    RESPONSE_BODY = 5
    RESPONSE_TRAILERS = 6
    GARBAGE = 7


class BodyMode(enum.IntEnum):
    """Mode in which Envoy sends a body (ext_proc ProcessingMode.BodySendMode)."""

    __hash__ = int.__hash__

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class BodyModes(msgspec.Struct, frozen=True, gc=False):
    """The body modes of both directions (`protocol_config` of the first message)."""

    request: BodyMode
    response: BodyMode


#: What a data plane that sends no `protocol_config` means. Envoy sends it since 1.33; gateways
#: and test clients that do not are written for the endpoint picker protocol, which demands
#: FULL_DUPLEX_STREAMED (EPP protocol 004).
DEFAULT_BODY_MODES = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


class LbMetadata(msgspec.Struct, frozen=True, gc=False):
    """Metadata of a message (EPP protocol 004).

    Attributes:
        subset: Tokens of `envoy.lb.subset_hint`; None when the key is absent.
        balancer: Whether the `envoy.lb` namespace is there at all.
        served: The endpoint that served, from `envoy.lb`; empty when absent.
    """

    subset: tuple[str, ...] | None = None
    balancer: bool = False
    served: str = ""


NO_HEADERS: Mapping[str, str] = {}


class ProcessingRequest(msgspec.Struct, frozen=True, gc=False):
    """One message from the data plane.

    Attributes:
        kind: Kind of the message.
        headers: Of a headers or trailers message, names in lower case; of duplicates the last.
        body: Of a body message.
        end_of_stream: Nothing more comes in this direction, trailers included.
        modes: Body modes, on the message that declares them.
        hints: Metadata, if the message carries any.
    """

    kind: MessageKind
    headers: Mapping[str, str] = NO_HEADERS
    body: bytes = b""
    end_of_stream: bool = False
    modes: BodyModes | None = None
    hints: LbMetadata | None = None
