"""Sends the requests of a simulated workload to real servers.

`Texts` turns block keys into prompts that the HTTP engine cuts into the same blocks, `Wall` is the
simulator's timeline on the real clock, and `play` drives the simulator's own `client.Sender` with
both: the same requests in the same order at the same times.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence

import aiohttp
import msgspec

from extproc.simulator import prompt
from extproc.simulator.fleet import client, run_metrics, scenario, workloads
from extproc.simulator.fleet.picker import MODEL
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimRequest, SimSession

BLOCK_BYTES = KEY_TOKENS * prompt.BYTES_PER_TOKEN

#: The end of a stream that holds its usage: the last chunk, and [DONE].
_TAIL_BYTES = 1024


#: Adapters salt the keys above these bits (`workloads.adapted`); engine and picker know of adapters
#: without us, so the same prompt for another adapter is the same text.
_UNSALTED = (1 << 44) - 1


class Spelled:
    """A workload whose requests name the beginning of their real text as their opening.

    Strategies that hash the opening then send a request to the same endpoint in both worlds.

    Args:
        workload: Any but a trace, of prompts of 32 tokens or more.
    """

    def __init__(self, workload: workloads.Workload) -> None:
        self.adapters = workloads.adapters(workload)
        self._workload = workload

    def source(self, rng: random.Random) -> Iterator[SimSession]:
        """See any workload."""
        replace = msgspec.structs.replace
        for session in workloads.sessions(self._workload, rng):
            works = [
                replace(work, opening="".join(_of_key(key) for key in work.keys[:2]))
                for work in session.specs
            ]
            yield replace(session, specs=works)


class Texts:
    """Prompts by their block keys: equal keys are equal text, different keys different text.

    The keys of a conversation go on over its answers, whose text is the engine's: it is the hash of
    the prompt, so it is known when the prompt is made, and the next turn repeats it.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._rendered = 0

    def render(self, work: RequestSpec) -> str:
        """The prompt of a request, exactly as long as it says."""
        self._rendered += 1
        texts, keys = self._texts, [key & _UNSALTED for key in work.keys]
        full, rest = divmod(work.prompt_tokens * prompt.BYTES_PER_TOKEN, BLOCK_BYTES)
        blocks = [texts.setdefault(key, _of_key(key)) for key in keys[:full]]
        # A request without a key shares nothing.
        own = f"own {self._rendered}"
        blocks += [_fresh(f"{own} {depth}") for depth in range(len(blocks), full)]
        if len(keys) <= full:
            return "".join(blocks) + _fresh(own)[:rest]
        # The answer begins in a block that later prompts repeat.
        text = "".join(blocks) + (texts.get(keys[full]) or _of_key(keys[full]))[:rest]
        text_with_answer = text + prompt.answer(text.encode(), work.output_tokens)
        for depth in range(full, min(len(keys), len(text_with_answer) // BLOCK_BYTES)):
            texts.setdefault(
                keys[depth], text_with_answer[depth * BLOCK_BYTES : (depth + 1) * BLOCK_BYTES]
            )
        return text


def _of_key(key: int) -> str:
    return _fresh(str(key & _UNSALTED))


def _fresh(name: str) -> str:
    """64 characters that hold for a name."""
    return hashlib.blake2b(name.encode(), digest_size=BLOCK_BYTES // 2).hexdigest()


class Wall:
    """The timeline of a simulated world on the event loop's clock.

    Attributes:
        broken: What an act raised; it ends the run.
        late_s: Seconds by which acts came late, on average: what the machine kept from us.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._serial = 0
        self._late_s = 0.0
        self.broken: Exception | None = None

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._loop.time() - self._start

    @property
    def late_s(self) -> float:
        """See the class."""
        return self._late_s / max(1, self._serial)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """See `EventQueue.at`: what is planned for one moment happens in the order it was planned."""
        self._serial += 1
        due = max(when, self.now)
        self._loop.call_at(self._start + due + 1e-9 * self._serial, self._do, due, act)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """See `EventQueue.after`."""
        self.at(self.now + seconds, act)

    def _do(self, due: float, act: Callable[[], None]) -> None:
        self._late_s += self.now - due
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the run ends with it
            self.broken = self.broken or error


class Lane:
    """Sends trips over HTTP and follows their streams.

    Args:
        session: With the base URL of the proxy.
        wall: The clock.
        ports: Ports of the engines, in the order of the fleet.
        on_ended: Called with every trip that ended.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        wall: Wall,
        *,
        ports: Sequence[int],
        on_ended: Callable[[SimRequest], None],
    ) -> None:
        self._session = session
        self._wall = wall
        self._sites = {str(port): n for n, port in enumerate(ports)}
        self._on_ended = on_ended
        self._texts = Texts()
        self._sent = 0
        self._tasks: asyncio.TaskGroup | None = None

    def under(self, tasks: asyncio.TaskGroup) -> None:
        """Requests are tasks of this group."""
        self._tasks = tasks

    def send(self, work: RequestSpec) -> SimRequest:
        """Send a request; returns at once."""
        assert self._tasks is not None
        self._sent += 1
        body = {
            "model": work.adapter or MODEL,
            "prompt": self._texts.render(work),
            "max_tokens": work.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        encoded = msgspec.json.encode(body)
        request = SimRequest(f"r{self._sent}", work, self._wall.now)
        self._tasks.create_task(self._follow(request, encoded), name=request.id)
        return request

    async def _follow(self, request: SimRequest, body: bytes) -> None:
        wall, tail = self._wall, b""
        headers = {"content-type": "application/json", "x-request-id": request.id}
        if request.work.session:
            headers["x-session-id"] = request.work.session
        try:
            async with self._session.post("/v1/completions", data=body, headers=headers) as answer:
                request.node = self._sites.get(answer.headers.get("x-inference-port", ""), -1)
                if answer.status != 200:
                    request.failure = f"status {answer.status}"
                async for chunk in answer.content.iter_any():
                    if math.isnan(request.first_s):
                        request.first_s = wall.now - request.sent_at
                    tail = (tail + chunk)[-_TAIL_BYTES:]
            request.took_s = wall.now - request.sent_at
            request.failure = request.failure or _settle(request, tail)
        except aiohttp.ClientError as error:
            request.failure = type(error).__name__
        self._on_ended(request)


def _settle(request: SimRequest, tail: bytes) -> str:
    """Read the usage at the end of a stream; returns what is wrong with it."""
    lines = [line for line in tail.split(b"\n") if line.startswith(b"data: {")]
    usage = json.loads(lines[-1][6:]).get("usage") if lines else None
    if not usage:
        return "no usage"
    expected = (request.work.prompt_tokens, request.work.output_tokens)
    if (usage["prompt_tokens"], usage["completion_tokens"]) != expected:
        return f"usage {usage} for {expected}"
    request.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return ""


async def play(
    definition: scenario.Scenario, *, url: str, ports: Sequence[int], seed: int
) -> tuple[run_metrics.RunMetrics, float]:
    """Send a scenario's workload as the simulator's client of the same seed would.

    Args:
        whole: What is sent, and how it is offered.
        url: Of the proxy.
        ports: Ports of the engines, in the order of the fleet.
        seed: As of `world.World`.

    Returns:
        What came of it, times in real seconds, without gaps between tokens; and `Wall.late_s`.
    """
    wall, results = Wall(), run_metrics.RunMetrics(definition.measure_from_s)

    def ended(request: SimRequest) -> None:
        results.add(request)
        sender.finished(request)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        lane = Lane(session, wall, ports=ports, on_ended=ended)
        sender = client.Sender(
            definition.client,
            workloads.sessions(definition.workload, random.Random(seed * 2 + 1)),
            adapters=workloads.adapters(definition.workload),
            timeline=wall,  # type: ignore[arg-type]  # it is asked for `now`, `at` and `after`
            rng=random.Random(seed * 2 + 2),
            send=lane.send,
        )
        async with asyncio.TaskGroup() as tasks:
            lane.under(tasks)
            sender.start()
            while not sender.is_done:
                await asyncio.sleep(0.01)
                if wall.broken is not None:
                    raise wall.broken
    return results, wall.late_s
