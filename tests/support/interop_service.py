"""gRPC's interop service on the native server: doc/interop-test-descriptions.md of grpc/grpc."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from extproc.http2.messages import GrpcStatus
from extproc.server.http2_protocol import CallFactory, ServerCall

SERVICE: Final = "grpc.testing.TestService"

#: Fields of the messages that the cases use, by number: name, type, and the message type or whether
#: it is repeated.
_MESSAGES: Final[Mapping[str, Mapping[int, tuple[str, str]]]] = {
    "Payload": {2: ("body", "bytes")},
    "EchoStatus": {1: ("code", "int32"), 2: ("message", "string")},
    "SimpleRequest": {
        2: ("response_size", "int32"),
        3: ("payload", "Payload"),
        7: ("response_status", "EchoStatus"),
    },
    "SimpleResponse": {1: ("payload", "Payload")},
    "StreamingInputCallRequest": {1: ("payload", "Payload")},
    "StreamingInputCallResponse": {1: ("aggregated_payload_size", "int32")},
    "ResponseParameters": {1: ("size", "int32")},
    "StreamingOutputCallRequest": {
        2: ("response_parameters", "ResponseParameters*"),
        3: ("payload", "Payload"),
        7: ("response_status", "EchoStatus"),
    },
    "StreamingOutputCallResponse": {1: ("payload", "Payload")},
}


def _build_messages() -> Mapping[str, Any]:
    """Message classes by name."""
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "bytes": kinds.TYPE_BYTES,
        "int32": kinds.TYPE_INT32,
        "string": kinds.TYPE_STRING,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="tests/interop.proto", package="tests.interop", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for number, (field, kind) in fields.items():
            scalar = scalars.get(kind)
            added = described.field.add(
                name=field,
                number=number,
                label=kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL,
                type=scalar or kinds.TYPE_MESSAGE,
            )
            if scalar is None:
                added.type_name = f".tests.interop.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tests.interop.{name}"))
        for name in _MESSAGES
    }


MESSAGES: Final = _build_messages()


class InteropCall(ServerCall):
    """Call of the interop service."""

    def on_message(self, message: bytes) -> None:
        """Drop it."""

    def on_half_close(self) -> None:
        """End."""
        self.end()

    def on_terminated(self) -> None:
        """Nothing is open."""


class EmptyCall(InteropCall):
    """Answers an empty message."""

    def on_half_close(self) -> None:
        """Answer."""
        self.send((b"",))
        self.end()


class UnaryInteropCall(InteropCall):
    """Answers a payload of the size that the request names, or its status."""

    _request: Any = None

    def on_message(self, message: bytes) -> None:
        """Keep it."""
        self._request = MESSAGES["SimpleRequest"].FromString(message)

    def on_half_close(self) -> None:
        """Answer."""
        status = self._request.response_status
        if status.code:
            self.end(GrpcStatus(status.code), status.message)
            return
        payload = MESSAGES["Payload"](body=bytes(self._request.response_size))
        self.send((MESSAGES["SimpleResponse"](payload=payload).SerializeToString(),))
        self.end()


class StreamingInputCall(InteropCall):
    """Answers the size of all payloads."""

    _size = 0

    def on_message(self, message: bytes) -> None:
        """Add its size."""
        self._size += len(MESSAGES["StreamingInputCallRequest"].FromString(message).payload.body)

    def on_half_close(self) -> None:
        """Answer."""
        answer = MESSAGES["StreamingInputCallResponse"](aggregated_payload_size=self._size)
        self.send((answer.SerializeToString(),))
        self.end()


class FullDuplexCall(InteropCall):
    """Answers each message with payloads of the sizes that it names."""

    def on_message(self, message: bytes) -> None:
        """Answer."""
        request = MESSAGES["StreamingOutputCallRequest"].FromString(message)
        if request.response_status.code:
            self.end(GrpcStatus(request.response_status.code), request.response_status.message)
        else:
            self.send(list(_answers(request)))


class HalfDuplexCall(InteropCall):
    """Answers all messages at the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._requests: list[bytes] = []

    def on_message(self, message: bytes) -> None:
        """Keep it."""
        self._requests.append(message)

    def on_half_close(self) -> None:
        """Answer."""
        for request in self._requests:
            parsed = MESSAGES["StreamingOutputCallRequest"].FromString(request)
            self.send(list(_answers(parsed)))
        self.end()


def _answers(request: Any) -> Iterable[bytes]:
    for parameters in request.response_parameters:
        payload = MESSAGES["Payload"](body=bytes(parameters.size))
        yield MESSAGES["StreamingOutputCallResponse"](payload=payload).SerializeToString()


ROUTES: Final[Mapping[str, CallFactory]] = {
    f"/{SERVICE}/{method}": factory
    for method, factory in {
        "EmptyCall": EmptyCall,
        "UnaryCall": UnaryInteropCall,
        "StreamingInputCall": StreamingInputCall,
        "StreamingOutputCall": HalfDuplexCall,
        "FullDuplexCall": FullDuplexCall,
        "HalfDuplexCall": HalfDuplexCall,
    }.items()
}
