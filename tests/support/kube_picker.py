"""A picker that watches a cluster, as a process, asked for picks without a data plane."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from extproc.demo import stack
from tests.support import ext_proc_script, peer, serving

#: The engines' metrics are not scraped: pods of these tests are addresses.
UNSCRAPED = "scrape: {enabled: false}, scheduling: {strategy: round-robin}"

#: Seconds a change may take to be seen. Back-off of discovery may be part of it.
_SEEN_S = 300.0

_PATH = {":method": "GET", ":path": "/any", "x-request-id": "r"}


class PodPicker:
    """A running picker.

    Attributes:
        child: Its process.
        pages: Port of its pages.
    """

    def __init__(
        self, child: stack.Child, pages: int, channel: grpc.aio.Channel, http: aiohttp.ClientSession
    ) -> None:
        self.child = child
        self.pages = pages
        self.channel = channel
        self._http = http

    async def pick(self, *hint: str) -> str:
        """The endpoint of one request, among those that are hinted; empty if it was refused."""
        stream = serving.Stream(self.channel)
        metadata = peer.hinted(list(hint)) if hint else None
        await stream.say(ext_proc_script.request_headers(_PATH, ends=True, metadata=metadata))
        (text,) = await stream.hear()
        stream.call.cancel()
        if text.status:
            assert text.status == 503, text
            return ""
        return dict(text.sets)[peer.DESTINATION]

    async def connected(self) -> None:
        """Wait until a stream can be opened without connecting first."""
        await self.channel.channel_ready()

    async def pool(self) -> list[str]:
        """Every endpoint of every pool that it knows, in order of address."""
        url = f"http://{serving.LOCAL}:{self.pages}/debug/pools"
        async with self._http.get(url) as answer:
            pools: dict[str, Any] = (await answer.json())["pools"]
        return sorted(item["address"] for pool in pools.values() for item in pool["endpoints"])

    async def ready(self) -> bool:
        """True if it reports that it is ready."""
        async with self._http.get(f"http://{serving.LOCAL}:{self.pages}/readyz") as answer:
            return answer.status == 200

    async def page(self, path: str) -> str:
        """Text of one of its pages."""
        async with self._http.get(f"http://{serving.LOCAL}:{self.pages}{path}") as answer:
            return await answer.text()

    async def knows(self, addresses: Collection[str]) -> None:
        """Wait until its pool is exactly this: nothing lost, nothing twice."""
        await self.until(self.pool, lambda result: result == sorted(addresses))

    async def until(self, ask: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
        """Ask until it holds; there is no event for it outside the process."""
        result = None
        try:
            async with asyncio.timeout(_SEEN_S):
                while not holds(result := await ask()):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"it did not become so within {_SEEN_S} s: {result}") from None
        return result


@contextlib.asynccontextmanager
async def picker(
    kubeconfig: Path | None,
    *arguments: str,
    config: str = "",
    ready: str = "is listening",
    pages: int = 0,
):
    """Start a picker over a cluster; it ends with the block.

    Args:
        kubeconfig: Who it is; None leaves that to the rest.
        arguments: Further words of `extproc serve`, such as the pool's name.
        config: More of the configuration, in YAML's flow style.
        ready: What it says when the block may begin.
        pages: Port of its pages; 0 for a free one.
    """
    port, pages = stack.free_port(), pages or stack.free_port()
    text = "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, " + UNSCRAPED
    text += (f", {config}" if config else "") + "}"
    argv = [
        *(sys.executable, "-m", "extproc", "serve"),
        *("--host", serving.LOCAL, "--secure-serving=false", "--grpc-port", str(port)),
        *("--grpc-health-port", "0", "--metrics-port", str(pages), "--drain-timeout", "0s"),
        *(("--kubeconfig", str(kubeconfig)) if kubeconfig else ()),
        *("--config-text", text, *arguments),
    ]
    async with (
        stack.stack() as children,
        grpc.aio.insecure_channel(f"{serving.LOCAL}:{port}") as channel,
        aiohttp.ClientSession() as http,
    ):
        child = await children.start("extproc", argv, ready=ready)
        yield PodPicker(child, pages, channel, http)
