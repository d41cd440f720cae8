"""vLLM's gRPC surface through Envoy: frames and trailers, real client and real server."""

from __future__ import annotations

import asyncio
import collections
import contextlib

import grpc
import pytest

from extproc.demo import stack
from tests.e2e import http2, installation

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
EMBED = "/vllm.grpc.engine.VllmEngine/Embed"
OTHER = "/vllm.grpc.engine.VllmEngine/GetModelInfo"

#: GenerateRequest{2: TokenizedInput{2: input_ids packed 1..9}}; EmbedRequest reads the same field.
MESSAGE = b"\x12\x0b\x12\x09" + bytes(range(1, 10))


def frame(message, *, flag=0):
    """A message as it stands in the body."""
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


class GrpcEngine:
    """A real gRPC server that notes what it is asked.

    Attributes:
        asked: (method, message) of every call.
        hold: Streams stop after their first message until it is set.
        left: Set when a stream's client left.
    """

    def __init__(self):
        self.calls = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.left = asyncio.Event()

    def service(self, details):
        """One handler for whatever is called."""
        method = details.method

        async def answer(message, context):
            self.calls.append((method, message))
            context.set_trailing_metadata((("x-usage", "7"),))
            if message == b"fail":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
            try:
                yield b"first " + message
                await self.hold.wait()
                yield b"second"
            except (asyncio.CancelledError, GeneratorExit):
                self.left.set()
                raise

        return grpc.unary_stream_rpc_method_handler(answer)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, engine):
        self._engine = engine

    def service(self, details):
        return self._engine.service(details)


@contextlib.asynccontextmanager
async def serving():
    """An engine and its address."""
    engine = GrpcEngine()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(engine),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield engine, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def speak_http2(config):
    """The engines behind gRPC clients speak HTTP/2."""
    options = installation.cluster(config, "engines")["typed_extension_protocol_options"]
    (http,) = options.values()
    http["explicit_http_config"] = {"http2_protocol_options": {}}


@pytest.fixture(scope="module")
def backend(live):
    with live.holding(serving()) as item:
        yield item


@pytest.fixture(scope="module")
def engine(backend):
    return backend[0]


@pytest.fixture(scope="module")
def place(live, backend):
    with live.holding(installation.installed(backend[1], change=speak_http2)) as item:
        yield item


@contextlib.asynccontextmanager
async def calling(port, method, message):
    """A call with one message up and any number down."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_stream(method)(message)


@pytest.mark.parametrize("method", [GENERATE, EMBED])
async def test_107_generate_and_embed(place, engine, method):
    """A call that is read for routing arrives byte for byte, and its answer with its trailers."""
    async with calling(place.port, method, MESSAGE) as call:
        answers = [answer async for answer in call]
        assert await call.code() is grpc.StatusCode.OK
        assert dict(await call.trailing_metadata())["x-usage"] == "7"
    assert answers == [b"first " + MESSAGE, b"second"]
    assert engine.calls[-1] == (method, MESSAGE)
    await place.settled()


@pytest.mark.parametrize("cuts", [[1], [5], [7], [1, 2, 3, 4, 5, 6]])
async def test_108_frame_cut_across_chunks(place, engine, cuts):
    """A frame that comes in pieces is joined."""
    answer = await http2.ask(
        place.port,
        GENERATE,
        frame(MESSAGE),
        headers=[("content-type", "application/grpc"), ("te", "trailers")],
        cuts=cuts,
    )
    assert dict(answer.trailers)["grpc-status"] == "0"
    assert engine.calls[-1] == (GENERATE, MESSAGE)


@pytest.mark.parametrize("body", [frame(MESSAGE, flag=1), frame(MESSAGE)[:-3], b"\x00\x00"])
async def test_109_bad_frames(place, engine, body):
    """A compressed or short frame is refused, in the way a gRPC client understands."""
    before = len(engine.calls)
    answer = await http2.ask(
        place.port,
        GENERATE,
        body,
        headers=[("content-type", "application/grpc"), ("te", "trailers")],
    )
    result = dict([*answer.head.headers, *answer.trailers])
    assert result["grpc-status"] == "3"
    assert result["content-type"] == "application/grpc"
    text = "inference error: BadRequest - invalid or unsupported gRPC payload"
    assert result["grpc-message"] == text
    assert len(engine.calls) == before


async def test_110_unknown_method(place, engine):
    """An unknown method is routed raw, and its ext_proc stream ends before its answer does."""
    engine.hold.clear()
    ended = 'extproc_streams_total{result="ok"}'
    before = (await place.metrics()).get(ended, 0)
    async with calling(place.port, OTHER, b"anything") as call:
        assert await call.read() == b"first anything"
        await place.until(lambda result: result.get(ended, 0) == before + 1)
        await place.settled()
        engine.hold.set()
        assert await call.read() == b"second"
        assert await call.code() is grpc.StatusCode.OK
    assert engine.calls[-1] == (OTHER, b"anything")


async def test_111_stream_is_in_flight_until_its_trailers(place, engine):
    """A stream of two frames is charged to its engine until the trailers."""
    engine.hold.clear()
    async with calling(place.port, GENERATE, MESSAGE) as call:
        assert await call.read() == b"first " + MESSAGE
        assert await place.total("extproc_endpoint_inflight_requests") == 1
        engine.hold.set()
        assert await call.read() == b"second"
        assert await call.code() is grpc.StatusCode.OK
    await place.settled()


async def test_104_status_of_the_engine(place):
    """A call the engine refuses keeps the engine's status and words."""
    async with calling(place.port, OTHER, b"fail") as call:
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == "queue is full"


async def test_119_client_cancels(place, engine):
    """A call that is cancelled mid-stream ends at the engine, too, and frees its account."""
    engine.hold.clear()
    engine.left.clear()
    async with calling(place.port, GENERATE, MESSAGE) as call:
        assert await call.read() == b"first " + MESSAGE
        call.cancel()
        await engine.left.wait()
    engine.hold.set()
    await place.settled()


async def test_121_without_an_engine_a_call_is_unavailable():
    """Without an engine a call is UNAVAILABLE."""
    gone = f"127.0.0.1:{stack.free_port()}"
    async with (
        installation.installed(gone, change=speak_http2) as other,
        calling(other.port, GENERATE, MESSAGE) as call,
    ):
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_121_an_engine_that_refuses_connections_is_ejected(backend):
    """Envoy answers its calls with HTTP status 200; they count as failures all the same."""
    gone = f"127.0.0.1:{stack.free_port()}"
    config = installation.UNSCRAPED[:-1] + ", health: {failures: 1, base_s: 600, cap_s: 600}}"
    words = ["--config-text", config]
    async with installation.installed(
        gone, backend[1], change=speak_http2, arguments=words
    ) as other:
        codes = collections.Counter()
        for _ in range(40):
            async with calling(other.port, GENERATE, MESSAGE) as call:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert [answer async for answer in call]
                codes[await call.code()] += 1
        values = await other.metrics()
    assert codes == {grpc.StatusCode.UNAVAILABLE: 1, grpc.StatusCode.OK: 39}
    assert values[f'extproc_responses_total{{endpoint="{gone}",status="503"}}'] == 1
