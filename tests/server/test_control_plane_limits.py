"""Limits on what clients send to the ports of xDS and of KEDA's scaler."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from extproc.config.autoscaling import AutoscalingSection, KedaSection
from extproc.config.settings import XdsSection
from extproc.server import control_plane_servers
from extproc.telemetry.control_plane_metrics import XdsCounters
from extproc.xds.resources import CLUSTER, ClusterOptions
from tests.support import serving
from tests.support.xds_peer import discovery

ENDPOINT = "10.0.0.1:8000"


@pytest.mark.parametrize("kind", ["xds", "keda"])
async def test_a_request_of_a_control_plane_has_a_megabyte(kind: str):
    """Above it the call ends, however large bodies may be."""
    async with serving.running(
        serving.settings(ENDPOINT),
        xds=XdsSection(enabled=True, port=0),
        autoscaling=AutoscalingSection(keda=KedaSection(enabled=True, port=0)),
    ) as picker:
        port, method = {
            "xds": (
                picker.ports.xds,
                f"{control_plane_servers.SERVICE}/{control_plane_servers.SOTW}",
            ),
            "keda": (picker.ports.keda, "externalscaler.ExternalScaler/StreamIsActive"),
        }[kind]
        async with grpc.aio.insecure_channel(f"{serving.LOCAL}:{port}") as channel:
            call = channel.stream_stream(f"/{method}")()
            await call.write(bytes(1 << 20) + b"more")
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class FloodingCall:
    """A call that sends without end, and whose first answer is never taken."""

    def __init__(self) -> None:
        self.num_reads = 0

    async def read(self) -> bytes:
        self.num_reads += 1
        return bytes(discovery.DiscoveryRequest(type_url=CLUSTER))

    async def write(self, _: bytes) -> None:
        await asyncio.Event().wait()


async def test_requests_of_an_xds_stream_wait_at_the_client():
    """One is being answered, four wait, and the next is not read before one of them is."""
    servicer = control_plane_servers.AggregatedDiscoveryServicer(
        dict, h2c=frozenset, synced=lambda: True, options=ClusterOptions(), counters=XdsCounters()
    )
    servicer.step()
    call = FloodingCall()
    handler = asyncio.ensure_future(servicer.stream_sotw(None, call))
    for _ in range(100):
        await asyncio.sleep(0)
    assert call.num_reads == 6
    handler.cancel()
    await asyncio.wait([handler])
