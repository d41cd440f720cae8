"""Engines that render prompts as scripted, and the prompts that they are asked for."""

import asyncio
import contextlib
import gzip
import json
from array import array
from pathlib import Path

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.prefix_cache import blocks
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.prefix_cache.kv_events import BlockStored
from extproc.request import HttpRequest, InferenceRequest, MediaSpan
from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.scrape.prompt_renderer import PromptRenderer
from extproc.supervision import Supervisor
from tests.scrape.conftest import ScriptedServer, answer, serving
from tests.support.waiting import until

CAPTURES = sorted((Path(__file__).parents[1] / "prefix_cache" / "captures").glob("*.json"))
CHAIN = [11, 12]
TOKENS = list(range(48))
ALONE = KvEventsSection()
RENDERED = {"token_ids": TOKENS, "features": None}
IMAGE = (MediaSpan("image", 0, 64, 16, is_sized=True),)


def features(identifier):
    """Features of a rendered prompt with an image."""
    spans = {"image": [{"offset": 8, "length": 16}]}
    return {"mm_hashes": {"image": [identifier]}, "mm_placeholders": spans}


def reply(document, **fields):
    return answer(json.dumps(document).encode(), **fields)


#: An answer that is compressed though extproc asks for none that is: a few bytes may be gigabytes.
ZIPPED = answer(gzip.compress(json.dumps(RENDERED).encode()), fields=["content-encoding: gzip"])

#: An answer in chunks with far more framing than content.
TINY_CHUNKS = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"1;%b\r\n \r\n" % (b"x" * 4000) * 3000
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(json.dumps(RENDERED)), json.dumps(RENDERED).encode())
)


def exact():
    """A pool whose engines have blocks of 16 tokens."""
    prefixes = ExactPrefixes(blocks.DEFAULT, max_blocks=100)
    engine = prefixes.open(("e", 0), 0)
    event = BlockStored([1], None, array("I", range(16)).tobytes(), 16)
    prefixes.index.apply(engine, event)
    return prefixes


@contextlib.asynccontextmanager
async def running(*script, settings=ALONE, prefixes=None):
    """A renderer beside an engine that answers by a script."""
    async with serving(ScriptedServer(*script)) as server:
        clock = asyncio.get_running_loop().time
        prefixes = prefixes or exact()
        renderer = PromptRenderer(
            prefixes,
            adapters=frozenset,
            scheme="http",
            tls=None,
            clock=clock,
            supervisor=Supervisor(),
            settings=settings,
        )
        task = asyncio.ensure_future(renderer.run())
        try:
            yield server, prefixes, renderer
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def decision(server, *, api="chat", chain=CHAIN, edit=None, media=()):
    return Decision(
        request=InferenceRequest(api=api, model="m", prompt_bytes=192, media=media),
        endpoints=(Endpoint(f"127.0.0.1:{server.port}"),),
        block_hashes=chain,
        body_edit=edit,
    )


async def mapped(server, renderer, *, body=b'{"a": 1}', **fields):
    """Note a request, and wait for the result."""
    before = dict(renderer.results)
    renderer.note(decision(server, **fields), HttpRequest({}, body))
    await until(lambda: not renderer.num_unmapped)
    return [name for name, count in renderer.results.items() if count != before[name]]
