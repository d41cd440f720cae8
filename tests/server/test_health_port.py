"""The health port: what its clients cannot do to memory and to the ext_proc port."""

from __future__ import annotations

import grpc
import pytest

from extproc.config.settings import LimitsSection
from extproc.wire import codec
from tests.support import serving
from tests.support.http2_client import Http2Client
from tests.support.http2_frames import CALL, message, number

ENDPOINT = "10.0.0.1:8000"
CHECK_CALL = [*CALL[:2], (":path", serving.CHECK), *CALL[3:]]

#: Above `health.MAX_REQUEST_BYTES`.
LONG_NAME = "n" * 2000


@pytest.mark.parametrize("kind", ["native", "grpcio"])
async def test_a_large_request_of_health_is_refused(kind: str):
    """The largest message is for bodies, which the health port does not take."""
    async with serving.running(serving.settings(ENDPOINT, transport=kind)) as picker:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await picker.health(LONG_NAME)
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await picker.health("liveness") == "SERVING"


async def test_a_large_request_of_health_is_not_kept_on_the_ext_proc_port():
    """Its call ends although the client goes on, and is counted."""
    configuration = serving.settings(ENDPOINT, transport="native", health_checking=True)
    async with serving.running(configuration) as picker:
        client = await Http2Client.connect(picker.ports.grpc)
        stream_id = client.open(CHECK_CALL)
        client.framing.send_data(stream_id, message(bytes(2000)))
        client.flush()
        await client.until(lambda: client.answers[stream_id].is_over)
        assert client.answers[stream_id].grpc_status == "8"
        assert client.answers[stream_id].grpc_message == (
            "a request of health has at most 1024 bytes"
        )
        assert picker.picker.counters.http2_limits == {"message_bytes": 1}
        await client.close()


async def test_a_connection_has_few_open_calls_of_health():
    """A call beyond them is refused: each may stay open for a minute."""
    async with serving.running(serving.settings(ENDPOINT, transport="native")) as picker:
        client = await Http2Client.connect(picker.ports.health)
        await client.until(lambda: client.has_settings)
        assert client.framing.remote_settings.max_concurrent_streams == 100
        await client.close()


async def test_incomplete_requests_of_health_take_no_room_of_bodies():
    """A message of ext_proc in two pieces is taken while the health port holds as much."""
    limits = LimitsSection(max_assembly_bytes=20_000)
    configuration = serving.settings(ENDPOINT, transport="native")
    async with serving.running(configuration, limits=limits) as picker:
        stranger = await Http2Client.connect(picker.ports.health)
        for _ in range(18):
            stream_id = stranger.open(CHECK_CALL)
            stranger.framing.send_data(stream_id, b"\0" + number(1024) + bytes(1000))
        last = stranger.open(CHECK_CALL)
        stranger.framing.send_data(last, message(b""), end_stream=True)
        stranger.flush()
        await stranger.until(lambda: stranger.answers[last].is_over)
        assert stranger.answers[last].grpc_status == "0"
        client = await Http2Client.connect(picker.ports.grpc)
        path = f"/{codec.SERVICE}/{codec.METHOD}"
        stream_id = client.open([*CALL[:2], (":path", path), *CALL[3:]])
        garbage = message(bytes(19_000))
        for piece in (garbage[:16_000], garbage[16_000:]):
            client.framing.send_data(stream_id, piece)
        client.flush()
        await client.until(lambda: client.answers[stream_id].is_over)
        assert client.answers[stream_id].grpc_status == "3"  # it was read, and is no message
        assert not picker.picker.counters.http2_limits
        for connected in (stranger, client):
            await connected.close()
