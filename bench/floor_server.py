"""A gRPC server of constant responses: the same runtime and message count, no parsing.

python bench/floor_server.py PORT DESTINATION fds|buffered BODY_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
import uvloop

from extproc.protocol.messages import (
    BodyMode,
    ContinueResponse,
    MessageKind,
    ResponseHeadersMutation,
    RouteResponse,
    StreamedBodyResponse,
)
from extproc.wire import codec

REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY = 0x12, 0x1A, 0x22, 0x2A


async def main(port: int, destination: str, mode: str, body: bytes) -> None:
    headers = codec.encode(RouteResponse(MessageKind.REQUEST_HEADERS, destination))
    response = codec.encode(
        StreamedBodyResponse(MessageKind.REQUEST_BODY, body, end_of_stream=True)
    )
    buffered = codec.encode(RouteResponse(MessageKind.REQUEST_BODY, destination))
    acknowledged = codec.encode(ContinueResponse(MessageKind.REQUEST_HEADERS))
    # Buffered, extproc asks for the answer's body: the floor does too.
    override = BodyMode.BUFFERED if mode == "buffered" else None
    answered = codec.encode(
        ResponseHeadersMutation((("x-went-into-resp-headers", "true"),), override)
    )
    passed = codec.encode(ContinueResponse(MessageKind.RESPONSE_BODY))

    async def process(_, context) -> None:
        count = 0
        while True:
            data = await context.read()
            if data is grpc.aio.EOF:
                return
            kind = data[0]
            if kind == REQUEST_HEADERS:
                if mode == "buffered":
                    await context.write(acknowledged)
            elif kind == REQUEST_BODY:
                count += len(data)
                if mode == "buffered":
                    await context.write(buffered)
                elif _last(data):
                    await context.write(headers)
                    await context.write(response)
            elif kind == RESPONSE_HEADERS:
                await context.write(answered)
            elif kind == RESPONSE_BODY:
                await context.write(passed)

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 27)])
    handler = grpc.stream_stream_rpc_method_handler(process)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(codec.SERVICE, {codec.METHOD: handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("floor is ready", flush=True)
    await server.wait_for_termination()


def _last(data: bytes) -> bool:
    """True if an HttpBody message has end_of_stream: by length arithmetic, without a parser."""
    size, at = _varint(data, 1)
    inner = data[at : at + size] if size < 64 else data[at + size - 2 : at + size]
    return inner.endswith(b"\x10\x01")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


if __name__ == "__main__":
    body = Path(sys.argv[4]).read_bytes()
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], body))
