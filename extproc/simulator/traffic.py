"""Traffic: requests and their sessions to simulate, read from a recording, a trace or a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.errors import ConfigError
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimSession

#: Requests that are read at most (count); a simulation takes some 0.3 ms and 5 kB for each.
MAX_REQUESTS: Final = 1_000_000

#: Seconds between two arrivals at most: a night without requests is simulated, a change of the clock not.
_MAX_GAP_S: Final = 86_400.0

_MIX: Final = 0x9E3779B97F4A7C15
_KEY_MASK: Final = (1 << 60) - 1


class TrafficRequest(msgspec.Struct, gc=False):
    """One request of a recording. Mutable while it is read.

    Attributes:
        at: Seconds from the first request to its arrival.
        spec: What it asks of an engine.
        answer_ended_s: Seconds from the first request to its end; None while unknown.
        ttft_s: Measured seconds from the arrival to the first token; None where unknown.
        node: Index of the engine that it went to, in the order of the fleet; -1 where that left.
        cached_tokens: Prompt tokens that this engine found in its cache; None where unknown.
    """

    at: float
    spec: RequestSpec
    answer_ended_s: float | None = None
    ttft_s: float | None = None
    node: int = -1
    cached_tokens: int | None = None


class Traffic(msgspec.Struct, frozen=True):
    """Requests to simulate, and what was measured of them.

    Attributes:
        requests: Requests by time of arrival.
        sessions: Sessions of the requests, by time of their beginning.
        places: Place of each request among those of all sessions, one session after the other.
        adapter_names: LoRA adapters they name.
        num_estimated: Requests whose tokens of the answer are estimated (count).
        num_open: Of these, requests whose end is not in the recording (count).
        num_failed: Requests left out because they failed (count).
        knows_max_tokens: Whether the limits of requests are the lengths of their answers.
    """

    requests: Sequence[TrafficRequest]
    sessions: Sequence[SimSession]
    places: Sequence[int] = ()
    adapter_names: frozenset[str] = frozenset()
    num_estimated: int = 0
    num_open: int = 0
    num_failed: int = 0
    knows_max_tokens: bool = False

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].at if self.requests else 0.0

    def scaled(self, rate_scale: float) -> Traffic:
        """The same requests at a rate so many times as high, without what was measured of them.

        Pauses of users are divided as arrivals are, so that long conversations are no exception.
        """
        requests = [
            msgspec.structs.replace(
                request, at=request.at / rate_scale, answer_ended_s=None, ttft_s=None
            )
            for request in self.requests
        ]
        sessions = [
            msgspec.structs.replace(
                session,
                at=(session.at or 0.0) / rate_scale,
                think_s=[seconds / rate_scale for seconds in session.think_s],
            )
            for session in self.sessions
        ]
        return msgspec.structs.replace(self, requests=requests, sessions=sessions)

    def sessions_as_recorded(self) -> list[SimSession]:
        """Each request as a session that begins when it came, and goes to the engine it went to.

        None waits for an answer: requests of users who wait would come in another order, which
        decisions of a rotation do not fit.
        """
        return [
            SimSession([msgspec.structs.replace(request.spec, node=request.node)], at=request.at)
            for request in self.requests
        ]

    def sessions_with_recorded_start(self) -> list[SimSession]:
        """The sessions; the first request of each model may only go to the engine it went to."""
        nodes: dict[int, int] = {}
        started: set[str] = set()
        for place, request in zip(self.places, self.requests, strict=True):
            target = request.spec.adapter or request.spec.model
            if target not in started:
                nodes[place] = request.node
                started.add(target)
        places = itertools.count()
        return [
            msgspec.structs.replace(
                session,
                specs=[
                    msgspec.structs.replace(spec, node=nodes.get(next(places), -1))
                    for spec in session.specs
                ],
            )
            for session in self.sessions
        ]

    def split(self, ratio: float) -> tuple[TrafficPart, TrafficPart]:
        """The sessions that begin first, with a share `ratio` of the requests, and the others."""
        wanted = ratio * len(self.requests)
        place = num_requests = 0
        while place < len(self.sessions) and num_requests < wanted:
            num_requests += len(self.sessions[place].specs)
            place += 1
        first, second = self.sessions[:place], self.sessions[place:]
        return _part(first, self.adapter_names), _part(second, self.adapter_names)


class TrafficPart(msgspec.Struct, frozen=True):
    """Sessions that are simulated by themselves; attributes as in `Traffic`."""

    sessions: Sequence[SimSession]
    places: Sequence[int]
    adapter_names: frozenset[str]


def _part(sessions: Sequence[SimSession], adapter_names: frozenset[str]) -> TrafficPart:
    begin = (sessions[0].at or 0.0) if sessions else 0.0
    shifted = [
        msgspec.structs.replace(session, at=(session.at or 0.0) - begin) for session in sessions
    ]
    num_requests = sum(len(session.specs) for session in sessions)
    return TrafficPart(shifted, range(num_requests), adapter_names)


def require_short_gaps(times_s: Sequence[float], where: str) -> None:
    """Refuse a gap in which a simulation would scrape idle engines for minutes.

    Args:
        times_s: Times of arrival, ascending.

    Raises:
        ConfigError: Two requests are too far apart.
    """
    for before_s, after_s in itertools.pairwise(times_s):
        if after_s - before_s > _MAX_GAP_S:
            raise ConfigError(
                where,
                wanted=f"requests at most {_MAX_GAP_S / 3600:.0f} hours apart",
                got=f"a gap of {(after_s - before_s) / 3600:.0f} hours",
                fix="replay the parts by themselves; --requests N takes the first N requests",
            )


def own_key(own: int, n: int) -> int:
    """Key that no other request has."""
    return ((own + 1) * _MIX ^ (n + 1) * 0xC2B2AE3D27D4EB4F) & _KEY_MASK


def inner_key(base: int, offset: int) -> int:
    """Key of a part of a block, by the key of the block and the number of the part."""
    return (base ^ offset * _MIX) & _KEY_MASK


#: Seconds that a picker may see the end of an answer later than its client, who goes on at once.
_END_LATENESS_S = 0.1

#: Tokens at the end of a prompt that open the answer, such as a tag of reasoning: a later prompt may
#: have others in their place.
_ANSWER_OPENING_TOKENS: Final = 64


class SessionBuilder:
    """Puts requests into sessions: a turn that came after the answer before it waits for it.

    So a slower fleet is asked later, as by people who read an answer before they go on.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], tuple[int, TrafficRequest, Sequence[int]]] = {}
        self._sessions: list[list[TrafficRequest]] = []

    def add(self, request: TrafficRequest, *, conversation: int, chain: Sequence[int]) -> None:
        """Add a request; they come by time of arrival.

        Args:
            conversation: What turns of a conversation have in common; 0 for nothing.
            chain: Block hashes of the prompt.
        """
        key = (conversation, request.spec.adapter)
        known = self._open.get(key) if conversation else None
        if known is not None:
            number, before, chain_before = known
            ended_s = before.answer_ended_s
            if ended_s is not None and ended_s <= request.at + _END_LATENESS_S:
                if len(chain) >= len(chain_before) and [*chain[: len(chain_before)]] == [
                    *chain_before
                ]:
                    before.spec = _with_answer(before, request)
                    keys, known_keys = request.spec.keys, before.spec.keys
                    keys = [*known_keys[: len(keys)], *keys[len(known_keys) :]]
                    request.spec = msgspec.structs.replace(request.spec, keys=keys)
                self._sessions[number].append(request)
                self._open[key] = number, request, chain
                return
        self._sessions.append([request])
        if conversation:
            self._open[key] = len(self._sessions) - 1, request, chain

    def sessions(self) -> list[SimSession]:
        """The sessions, by time of their beginning."""
        return [
            SimSession(
                [request.spec for request in turns],
                [
                    max(0.0, after.at - (before.answer_ended_s or 0.0))
                    for before, after in itertools.pairwise(turns)
                ],
                turns[0].at,
            )
            for turns in self._sessions
        ]

    def places(self, requests: Sequence[TrafficRequest]) -> list[int]:
        """See `Traffic`."""
        in_turn = (request for turns in self._sessions for request in turns)
        place_of = {id(request): place for place, request in enumerate(in_turn)}
        return [place_of[id(request)] for request in requests]


def _with_answer(before: TrafficRequest, after: TrafficRequest) -> RequestSpec:
    """The request of a turn whose keys go on over as much of its answer as the next one repeats.

    That is all of it unless the engine found less in its cache: tokens of reasoning are no part of
    later prompts. One that found less than the prompt may have evicted the rest, which shows nothing.
    """
    spec = before.spec
    begin, end = len(spec.keys), (spec.prompt_tokens + spec.output_tokens) // KEY_TOKENS
    cached_tokens = after.cached_tokens
    if (
        cached_tokens is not None
        and before.node == after.node >= 0
        and cached_tokens >= spec.prompt_tokens - _ANSWER_OPENING_TOKENS
    ):
        end = min(end, cached_tokens // KEY_TOKENS)
    salt = spec.keys[-1] if begin else spec.prompt_tokens
    keys = [*spec.keys, *(own_key(salt, n) for n in range(begin, end))]
    return msgspec.structs.replace(spec, keys=keys)
