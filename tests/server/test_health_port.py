"""The health port: what its clients cannot do to memory and to the ext_proc port."""

from __future__ import annotations

import grpc
import pytest

from tests.support import serving
from tests.support.http2_client import Http2Client
from tests.support.http2_frames import CALL, message

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
