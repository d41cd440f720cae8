from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.support import serving
from tests.support.house import House


class Context:
    """A call whose client says nothing until the test does."""

    def __init__(self):
        self.began = asyncio.Event()
        self.said = asyncio.get_running_loop().create_future()

    async def read(self):
        self.began.set()
        return await self.said


async def test_a_read_under_way_is_left_to_end_by_itself():
    """When the client leaves: gRPC would lose memory for good with each that is cancelled."""
    async with serving.serving(House({})) as scene:
        context = Context()
        handler = asyncio.ensure_future(scene.servicer.process(None, context))
        await context.began.wait()
        handler.cancel()
        await asyncio.wait([handler], timeout=0.01)
        assert not handler.done()
        assert not context.said.cancelled()
        context.said.set_result(grpc.aio.EOF)
        with pytest.raises(asyncio.CancelledError):
            await handler
        tallies = scene.servicer.shared.tallies
        assert (tallies.streams["cancelled"], tallies.streams_open) == (1, 0)
