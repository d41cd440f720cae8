import asyncio

import pytest

from extproc.server import grpc_workarounds


class ReadingCall:
    """Reads that end on demand, and their results."""

    def __init__(self):
        self.futures = []
        self.breaking = False

    async def read(self):
        future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        return await future

    def operations(self):
        return grpc_workarounds.UncancelledOperations(lambda: self.breaking)


@pytest.fixture
def calls():
    return ReadingCall()


async def begun(calls, count):
    """Let the loop turn until so many reads have begun."""
    async with asyncio.timeout(300):
        while len(calls.futures) < count:
            await asyncio.sleep(0)


async def test_reads_are_sequential(calls):
    """Each await is one read, and gives what it read."""
    operations = calls.operations()

    async def three():
        return [await operations.run(calls.read()) for _ in range(3)]

    task = asyncio.ensure_future(three())
    for number in range(3):
        await begun(calls, number + 1)
        calls.futures[number].set_result(number)
    assert await task == [0, 1, 2]


async def test_a_read_that_raises_propagates(calls):
    """An exception of a read reaches its caller."""
    task = asyncio.ensure_future(once(calls))
    await begun(calls, 1)
    calls.futures[0].set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        await task


async def once(calls):
    return await calls.operations().run(calls.read())


async def test_cancelling_waits_for_the_read(calls):
    """The read is left alone; the task is cancelled when it ends."""
    task = asyncio.ensure_future(once(calls))
    await begun(calls, 1)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not calls.futures[0].cancelled()
    assert not task.done()
    calls.futures[0].set_result("the end")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_ends_a_read_that_would_not_end(calls):
    """If the call continues, nothing else would end the read."""
    calls.breaking = True
    task = asyncio.ensure_future(once(calls))
    await begun(calls, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.futures[0].cancelled()


async def test_a_task_cancelled_before_its_read_reads_nothing(calls):
    """Cancelled before its first step, it reads nothing."""
    task = asyncio.ensure_future(once(calls))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not calls.futures


async def test_swallowing_the_cancellation(calls):
    """A task that goes on after its cancellation reads again."""
    operations = calls.operations()

    async def stubborn():
        try:
            await operations.run(calls.read())
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()
        return await operations.run(calls.read())

    task = asyncio.ensure_future(stubborn())
    await begun(calls, 1)
    task.cancel()
    await asyncio.sleep(0)
    calls.futures[0].set_result("lost")
    await begun(calls, 2)
    calls.futures[1].set_result("kept")
    assert await task == "kept"
