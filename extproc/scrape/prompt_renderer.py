"""Prompt renderer: asks engines for the tokens of prompts that were routed to them.

It works behind the choice of the endpoint: no request waits for it, unless there is a budget of time
for that. An engine is sent the bytes of
the client, at `/render` beneath the path of the API, or at `/tokenize` where it has none, and only
for prompts of which something is not yet mapped (`prefix_cache.exact_prefixes`). A server for rendering
is asked before the engine, if there is one, and a tokenizer of our own before both. Neither server is
trusted: redirects are not followed, compressed answers are not read, interim answers and the framing of
chunks are bounded, and nothing is built of an answer but its tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Literal, get_args

import msgspec

from extproc.decision import Decision
from extproc.parsing.model_edit import locate_model
from extproc.prefix_cache.exact_prefixes import ExactPrefixes
from extproc.request import HttpRequest
from extproc.scrape import client, local_tokenizer
from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.scrape.local_tokenizer import LocalTokenizer
from extproc.supervision import Supervisor

#: What came of a prompt.
PromptResult = Literal["mapped", "failed", "unsupported", "dropped"]

#: What ended the wait of a request: its prompt is mapped, could not be, or the budget of time is spent.
WaitResult = Literal["mapped", "failed", "expired"]

#: Paths by API, in the order in which they are tried.
_PATHS: Final[Mapping[str, Sequence[str]]] = {
    "chat": ("/v1/chat/completions/render", "/tokenize"),
    "completions": ("/v1/completions/render", "/tokenize"),
}

#: Fields behind those of a body with images: an answer without their pixels, which are megabytes. vLLM
#: 0.32 knows both, versions before it at most the second.
_NO_PIXELS: Final = b',"mm_payload":"none","return_mm_kwargs":false}'

#: Statuses of a path that an engine does not have, or not without an API key, which vLLM requires at
#: paths beneath `/v1` first. It answers 404 for an unknown model as well.
_ABSENT: Final = frozenset({401, 403, 404, 405, 501})

#: Requests to engines at a time (count), and to each: one that hangs leaves the others their share.
_NUM_WORKERS, _MAX_PER_ENGINE = 8, 2

#: Prompts that wait (count), and bytes of their bodies; beyond, prompts are not mapped.
_MAX_QUEUED, _MAX_QUEUED_BYTES = 256, 16 * 1024 * 1024

#: Bytes of a body at most, of one with images, which every turn of a conversation repeats, and of an
#: answer.
_MAX_BODY_BYTES, _MAX_MEDIA_BODY_BYTES = 1024 * 1024, 4 * 1024 * 1024
_MAX_ANSWER_BYTES = 4 * 1024 * 1024

#: Prompts of too many blocks, or with too large answers, that are remembered (count), so that they, and
#: what goes on from them, are not rendered again.
_MAX_TOO_LONG = 256

#: Characters of the identifier of an image at most, which is in the key of every block of it; a client
#: may choose it.
_MAX_IDENTIFIER = 256

#: Seconds that an engine may take.
_TIMEOUT_S = 5.0

#: Seconds that the first prompts wait for the first event, which has the size of blocks, and between
#: looks at it.
_SIZE_TIMEOUT_S, _SIZE_POLL_S = 2.0, 0.02

#: Seconds in which an engine is not asked after it failed, doubled with each further failure, at most,
#: and after it had none of the paths: an engine that hangs occupies two workers until the time-out.
_FAILED_PAUSE_S, _MAX_FAILED_PAUSE_S, _ABSENT_PAUSE_S = 5.0, 60.0, 60.0

#: Engines that are remembered (count).
_MAX_ENGINES = 4096


class _UnmappedPrompt(msgspec.Struct, eq=False):
    """A prompt to be mapped, by the engine at `address`.

    Attributes:
        waits: Requests that wait for it, with their bytes.
    """

    address: str
    api: str
    body: bytes
    chain: Sequence[int]
    adapter: str
    salt: str
    prompt_bytes: int
    num_media: int
    waits: dict[asyncio.Future[None], int] = {}


class _SaltedBody(msgspec.Struct):
    """Body of a request, as far as it keeps the blocks of its prompt apart from others."""

    cache_salt: str | None = None


class _Engine(msgspec.Struct):
    """Path at which an engine rendered last, by position, failures in a row, and when it is asked again.

    Attributes:
        has_answered: Whether it rendered a prompt since it failed last: it has a path, so that 404 at
            all of them is about the model of a prompt.
    """

    path: int = 0
    num_failures: int = 0
    paused_until: float = 0.0
    has_answered: bool = False


class PromptRenderer:
    """Maps the prompts of routed requests to tokens.

    Args:
        tls: For `https`; None for the usual one, and for engines without.

    Attributes:
        results: Prompts by result (count), all results from the start.
        waits: Requests that waited, by result (count), all results from the start.
    """

    def __init__(
        self,
        exact: ExactPrefixes,
        *,
        adapters: Callable[[], Collection[str]],
        scheme: str,
        tls: client.TlsSource | None,
        clock: Callable[[], float],
        supervisor: Supervisor,
        instance: str = "",
        settings: KvEventsSection,
    ) -> None:
        self._settings = settings
        self._tokenize: Callable[[str, bytes], Awaitable[array[int] | None]] | None = None
        self._exact = exact
        self._adapters = adapters
        self._scheme = scheme
        is_secure = settings.render_url.startswith("https:")
        self._engine_client, self._server_client = (
            client.ScrapeClient(timeout_s=_TIMEOUT_S, cap_bytes=_MAX_ANSWER_BYTES, tls=context)
            for context in (tls, (tls or client.build_tls()) if is_secure else None)
        )
        self._clock = clock
        self._supervisor = supervisor
        self._instance = instance
        self._queue: asyncio.Queue[_UnmappedPrompt] = asyncio.Queue()
        #: Prompts that wait because their engine has its share, and workers of each engine (count).
        self._parked: dict[str, deque[_UnmappedPrompt]] = {}
        self._num_at: Counter[str] = Counter()
        self._queued_bytes = 0
        #: Prompts that wait or are being rendered, by their last byte block.
        self._unmapped: dict[int, _UnmappedPrompt] = {}
        #: Last byte blocks of prompts of too many blocks, the oldest first.
        self._too_long: OrderedDict[int, None] = OrderedDict()
        self.num_waiting_bytes = 0
        self._engines: dict[str, _Engine] = {}
        self.results: Counter[PromptResult] = Counter(dict.fromkeys(get_args(PromptResult), 0))
        self.waits: Counter[WaitResult] = Counter(dict.fromkeys(get_args(WaitResult), 0))

    @property
    def num_unmapped(self) -> int:
        """Prompts that wait, or are being rendered (count)."""
        return len(self._unmapped)

    def note(self, decision: Decision, raw: HttpRequest) -> None:
        """Note a routed request; cheap where its prompt is mapped already."""
        exact = self._exact
        if exact.index.block_tokens or exact.is_any_live:
            self._queue_prompt(decision, raw)

    def render_ahead(self, decision: Decision, raw: HttpRequest) -> asyncio.Future[None] | None:
        """Render a prompt before its request is routed; None where nothing is waited for.

        Nothing is while no engine has stored a block, or more requests wait than have a place.
        """
        budget_s, size = self._settings.render_budget_ms / 1e3, len(raw.body)
        if not budget_s or not self._exact.index.block_tokens:
            return None
        if self.num_waiting_bytes + size > _MAX_QUEUED_BYTES:
            return None
        prompt = self._queue_prompt(decision, raw)
        if prompt is None or len(prompt.waits) >= _MAX_QUEUED:
            return None
        loop = asyncio.get_running_loop()
        wait = loop.create_future()
        prompt.waits[wait] = size
        self.num_waiting_bytes += size
        timer = loop.call_later(budget_s, self._end_wait, wait, "expired")

        def forget(_: asyncio.Future[None]) -> None:
            self.num_waiting_bytes -= prompt.waits.pop(wait, 0)
            timer.cancel()

        wait.add_done_callback(forget)
        return wait

    def _end_wait(self, wait: asyncio.Future[None], result: WaitResult) -> None:
        if not wait.done():  # its client may have left
            self.waits[result] += 1
            wait.set_result(None)

    def _queue_prompt(self, decision: Decision, raw: HttpRequest) -> _UnmappedPrompt | None:
        """The prompt of a request, which is to be mapped; None where it is already, or cannot be."""
        chain, request, exact = decision.block_hashes, decision.request, self._exact
        if exact.prompts.covers(chain):
            return None
        known = self._unmapped.get(chain[-1])
        if known is not None:
            return known
        address, settings = decision.endpoints[0].host_port, self._settings
        is_paused = not settings.render_url or self._is_paused(settings.render_url)
        if is_paused and not settings.tokenizer_path and self._is_paused(address):
            return None
        most = _MAX_MEDIA_BODY_BYTES if request.media else _MAX_BODY_BYTES
        if request.api not in _PATHS or not raw.body or len(raw.body) > most:
            return None
        salt = _read_salt(raw.body)
        if salt is None or not self._too_long.keys().isdisjoint(chain):
            self.results["unsupported"] += 1
            return None
        edit = decision.body_edit
        body = bytes(raw.body) if edit is None else edit.apply(raw.body)
        if len(self._unmapped) >= _MAX_QUEUED or self._queued_bytes + len(body) > _MAX_QUEUED_BYTES:
            self.results["dropped"] += 1
            return None
        self._queued_bytes += len(body)
        adapter = request.adapter or (request.model if request.model in self._adapters() else "")
        prompt = _UnmappedPrompt(
            address,
            request.api,
            body,
            chain,
            adapter,
            salt,
            request.stable_bytes,
            sum([span.count for span in request.media]),
        )
        self._queue.put_nowait(prompt)
        self._unmapped[chain[-1]] = prompt
        return prompt

    async def run(self) -> None:
        """Map prompts until cancelled."""
        # One thread: the loop needs the other core.
        thread = ThreadPoolExecutor(1, "tokenizer")
        try:
            if self._settings.tokenizer_path:
                self._tokenize = await self._load_tokenizer(thread)
            async with asyncio.TaskGroup() as tasks:
                for number in range(_NUM_WORKERS):
                    supervised = self._supervisor.keep(
                        "kv_events", self._work, instance=f"renderer {number}"
                    )
                    tasks.create_task(supervised, name=f"prompt renderer {number}")
        finally:
            self._engine_client.close()
            self._server_client.close()
            thread.shutdown(wait=False, cancel_futures=True)

    async def _load_tokenizer(
        self, thread: ThreadPoolExecutor
    ) -> Callable[[str, bytes], Awaitable[array[int] | None]]:
        """Load the tokenizer, which takes a second, and run it in a thread."""
        run = partial(asyncio.get_running_loop().run_in_executor, thread)
        tokenizer = await run(LocalTokenizer, self._settings.tokenizer_path)
        return partial(run, tokenizer.tokenize)

    async def _work(self) -> None:
        while True:
            prompt = await self._queue.get()
            address, num_at = prompt.address, self._num_at
            parked = self._parked.setdefault(address, deque())
            parked.append(prompt)
            if num_at[address] >= _MAX_PER_ENGINE:
                continue
            num_at[address] += 1
            try:
                while parked:
                    await self._handle(parked.popleft())
            finally:
                num_at[address] -= 1
                if not num_at[address]:
                    del num_at[address], self._parked[address]

    async def _handle(self, prompt: _UnmappedPrompt) -> None:
        self._queued_bytes -= len(prompt.body)
        result: PromptResult = "failed"
        try:
            result = await self._render(prompt)
        except Exception as error:  # noqa: BLE001 - one prompt must not end the worker
            self._supervisor.record_error("kv_events", error, instance=self._instance)
        finally:
            del self._unmapped[prompt.chain[-1]]
            for wait in list(prompt.waits):
                self._end_wait(wait, "mapped" if result == "mapped" else "failed")
        self.results[result] += 1

    async def _render(self, prompt: _UnmappedPrompt) -> PromptResult:
        """Map a prompt; returns the result."""
        if not await self._knows_size():
            return "dropped"
        if self._exact.prompts.covers(prompt.chain):
            return "mapped"  # another one was the same
        if self._tokenize is not None:
            try:
                tokens = await self._tokenize(prompt.api, prompt.body)
            except ValueError:
                return "failed"
            if tokens is not None:
                return self._map(prompt, tokens)
        url = self._settings.render_url
        if url and not self._is_paused(url):
            result = await self._render_at_server(prompt)
            if result is not None:
                return result
        return await self._render_at_engine(prompt)

    async def _render_at_engine(self, prompt: _UnmappedPrompt) -> PromptResult:
        """Map a prompt by its engine."""
        if self._is_paused(prompt.address):
            return "failed"
        engine = self._engine(prompt.address)
        paths = _PATHS[prompt.api]
        # The path at which it rendered last comes first; it may have been started again without it.
        for path in sorted(range(len(paths)), key=lambda path: path != engine.path):
            url = f"{self._scheme}://{prompt.address}{paths[path]}"
            body = prompt.body if path else _without_pixels(prompt, prompt.body)
            answer = await self._engine_client.post(client.post_target(url), body)
            if _is_absent(answer):
                continue
            if isinstance(answer, bytes):
                engine.path = path
            return self._conclude(prompt, answer, prompt.address) or "failed"
        if engine.has_answered:
            return "failed"  # it does not know the model
        engine.path = 0
        self._pause(prompt.address, _ABSENT_PAUSE_S)
        return "unsupported"

    async def _knows_size(self) -> bool:
        """True once the size of blocks is known; False if no event tells it in time."""
        until = self._clock() + _SIZE_TIMEOUT_S
        while not self._exact.index.block_tokens:
            if self._clock() >= until:
                return False
            await asyncio.sleep(_SIZE_POLL_S)
        return True

    async def _render_at_server(self, prompt: _UnmappedPrompt) -> PromptResult | None:
        """Map a prompt by the server for rendering; None where it cannot, and rests."""
        body, settings = prompt.body, self._settings
        if settings.render_model:
            edit = locate_model(
                HttpRequest({"content-type": "application/json"}, body), settings.render_model
            )
            body = body if edit is None else edit.apply(body)
        target = client.post_target(f"{settings.render_url}{_PATHS[prompt.api][0]}")
        answer = await self._server_client.post(target, _without_pixels(prompt, body))
        if _is_absent(answer) and self._engine(settings.render_url).has_answered:
            return None  # it has the base model only
        return self._conclude(prompt, answer, settings.render_url)

    def _conclude(
        self, prompt: _UnmappedPrompt, answer: bytes | client.FetchFailed, address: str
    ) -> PromptResult | None:
        """Map a prompt by an answer; None for one of no use, after which its sender rests."""
        result: PromptResult | None
        engine = self._engine(address)
        if isinstance(answer, client.FetchFailed):
            if answer.reason == client.TOO_LARGE and prompt.num_media:
                # With pixels, by an engine that cannot leave them out.
                result = self._note_too_long(prompt)
            else:
                is_refused = _is_refused(answer.status) or (
                    engine.has_answered and _is_absent(answer)
                )
                result = "failed" if is_refused else None
        else:
            result = self._map_answer(prompt, answer)
            engine.has_answered = True
        if result is None:
            engine.has_answered = False
            pause_s = _FAILED_PAUSE_S * 2.0 ** min(engine.num_failures, 30)
            engine.num_failures += 1
            self._pause(address, min(_MAX_FAILED_PAUSE_S, pause_s))
        else:
            engine.num_failures = 0
        return result

    def _map_answer(self, prompt: _UnmappedPrompt, answer: bytes) -> PromptResult | None:
        """Map a prompt by an answer; None for one that is malformed."""
        try:
            rendered = local_tokenizer.read_rendered(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError):
            return None
        return "unsupported" if rendered is None else self._map(prompt, *rendered)

    def _map(
        self,
        prompt: _UnmappedPrompt,
        tokens: array[int],
        placeholders: Sequence[tuple[int, int, str]] = (),
    ) -> PromptResult:
        if not tokens:
            return "failed"
        # `/tokenize` names no images.
        if len(placeholders) < prompt.num_media or any(
            len(identifier) > _MAX_IDENTIFIER for *_, identifier in placeholders
        ):
            return "unsupported"
        is_mapped = self._exact.map_prompt(
            prompt.chain,
            tokens,
            adapter=prompt.adapter,
            salt=prompt.salt,
            prompt_bytes=prompt.prompt_bytes,
            placeholders=placeholders,
        )
        return "mapped" if is_mapped else self._note_too_long(prompt)

    def _note_too_long(self, prompt: _UnmappedPrompt) -> PromptResult:
        self._too_long[prompt.chain[-1]] = None
        if len(self._too_long) > _MAX_TOO_LONG:
            self._too_long.popitem(last=False)
        return "unsupported"

    def _engine(self, address: str) -> _Engine:
        if len(self._engines) >= _MAX_ENGINES:
            self._engines.clear()
        return self._engines.setdefault(address, _Engine())

    def _is_paused(self, address: str) -> bool:
        engine = self._engines.get(address)
        return engine is not None and self._clock() < engine.paused_until

    def _pause(self, address: str, seconds: float) -> None:
        self._engine(address).paused_until = self._clock() + seconds


def _is_absent(answer: bytes | client.FetchFailed) -> bool:
    """True if an engine lacks the path, or the model of the prompt."""
    return isinstance(answer, client.FetchFailed) and answer.status in _ABSENT


def _is_refused(status: int) -> bool:
    """True if the prompt is at fault, such as one that is too long, and not who renders it."""
    return 400 <= status < 500 and status not in _ABSENT and status != 429


def _without_pixels(prompt: _UnmappedPrompt, body: bytes) -> bytes:
    """A body to be rendered, which asks for no pixels of its images."""
    return body.rstrip().removesuffix(b"}") + _NO_PIXELS if prompt.num_media else body


def _read_salt(body: bytes | bytearray) -> str | None:
    """Cache salt of a request; empty for none, None where it cannot be read."""
    if b'"cache_salt"' not in body:
        return ""
    try:
        return msgspec.json.decode(body, type=_SaltedBody).cache_salt or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
