"""gRPC's interop cases on the native server: clients of grpcio and of grpc-go.

doc/interop-test-descriptions.md of grpc/grpc. Cases of compression, authentication, caching and
custom metadata do not apply: the server has none of them.
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from extproc.server import tls
from tests.http2 import go_tools
from tests.support import http2_serving
from tests.support.interop_service import MESSAGES, ROUTES, SERVICE

#: Sizes of the case ping_pong.
REQUESTS = (27_182, 8, 1_828, 45_904)
ANSWERS = (31_415, 9, 2_653, 58_979)

STATUS = (grpc.StatusCode.UNKNOWN, "test status message")
SPECIAL = (
    grpc.StatusCode.UNKNOWN,
    "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n",
)

pytestmark = pytest.mark.parametrize("with_tls", [False, True], ids=["plaintext", "tls"])


@contextlib.asynccontextmanager
async def connected(with_tls):
    """Serve the interop cases; a channel of grpcio to them."""
    pair = tls.self_signed_pair()
    async with http2_serving.serve_native(ROUTES, pair=pair if with_tls else None) as (_, port):
        if with_tls:
            identity = grpc.ssl_channel_credentials(pair[1])
            options = [("grpc.ssl_target_name_override", "localhost")]
            channel = grpc.aio.secure_channel(f"{http2_serving.LOCAL}:{port}", identity, options)
        else:
            channel = grpc.aio.insecure_channel(f"{http2_serving.LOCAL}:{port}")
        async with channel:
            yield channel


def stream(channel, method="FullDuplexCall", **options):
    return channel.stream_stream(f"/{SERVICE}/{method}")(**options)


def request(sizes=(), body=0, status=None):
    fields = {
        "response_parameters": [{"size": size} for size in sizes],
        "payload": {"body": bytes(body)},
    }
    if status is not None:
        fields["response_status"] = {"code": status[0].value[0], "message": status[1]}
    return MESSAGES["StreamingOutputCallRequest"](**fields).SerializeToString()


async def read_sizes(call):
    """Sizes of all answers to the end."""
    sizes = []
    while (data := await call.read()) is not grpc.aio.EOF:
        sizes.append(len(MESSAGES["StreamingOutputCallResponse"].FromString(data).payload.body))
    return sizes


async def test_ping_pong(with_tls):
    async with connected(with_tls) as channel:
        call = stream(channel)
        for body, size in zip(REQUESTS, ANSWERS, strict=True):
            await call.write(request([size], body))
            answer = MESSAGES["StreamingOutputCallResponse"].FromString(await call.read())
            assert len(answer.payload.body) == size
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_half_duplex(with_tls):
    async with connected(with_tls) as channel:
        call = stream(channel, "HalfDuplexCall")
        for body, size in zip(REQUESTS, ANSWERS, strict=True):
            await call.write(request([size], body))
        await call.done_writing()
        assert await read_sizes(call) == list(ANSWERS)
        assert await call.code() is grpc.StatusCode.OK


async def test_empty_stream(with_tls):
    async with connected(with_tls) as channel:
        call = stream(channel)
        await call.done_writing()
        assert await read_sizes(call) == []
        assert await call.code() is grpc.StatusCode.OK


async def test_cancel_after_begin(with_tls):
    async with connected(with_tls) as channel:
        call = channel.stream_unary(f"/{SERVICE}/StreamingInputCall")()
        await call.wait_for_connection()
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_cancel_after_first_response(with_tls):
    async with connected(with_tls) as channel:
        call = stream(channel)
        await call.write(request([31_415], 27_182))
        assert await call.read() is not grpc.aio.EOF
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_timeout_on_sleeping_server(with_tls):
    async with connected(with_tls) as channel:
        call = stream(channel, timeout=0.001)
        # grpc.aio itself ends a call with INTERNAL whose time is over while it writes.
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("status", [STATUS, SPECIAL], ids=["plain", "special"])
async def test_status_code_and_message(with_tls, status):
    async with connected(with_tls) as channel:
        call = stream(channel)
        await call.write(request(status=status))
        await call.done_writing()
        assert (await call.code(), await call.details()) == status
        unary = channel.unary_unary(f"/{SERVICE}/UnaryCall")
        echoed = {"code": status[0].value[0], "message": status[1]}
        message = MESSAGES["SimpleRequest"](response_status=echoed).SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(message)
        assert (error.value.code(), error.value.details()) == status


@pytest.mark.parametrize("path", [f"/{SERVICE}/UnimplementedCall", "/grpc.testing.Missing/Call"])
async def test_unimplemented_method(with_tls, path):
    async with connected(with_tls) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary(path)(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


GO_CASES = (
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "timeout_on_sleeping_server",
    "cancel_after_begin",
    "cancel_after_first_response",
    "status_code_and_message",
    "special_status_message",
    "unimplemented_method",
    "unimplemented_service",
)


async def test_every_case_of_grpc_go(with_tls):
    client = go_tools.need("interopclient")
    async with http2_serving.serve_native(
        ROUTES, pair=tls.self_signed_pair() if with_tls else None
    ) as (server, port):
        process = await asyncio.create_subprocess_exec(
            client,
            f"-address={http2_serving.LOCAL}:{port}",
            f"-tls={str(with_tls).lower()}",
            *GO_CASES,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
    assert tuple(output.decode().split()) == GO_CASES, errors.decode()[-3000:]
    assert process.returncode == 0
    assert server.counts == {}
