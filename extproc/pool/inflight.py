"""In-flight accounts: open requests of this EPP on each endpoint.

An account belongs to one incarnation of one endpoint. It is changed only by reservations and by scrapes,
and a reservation is closed exactly once, so the counters return to zero when the last stream ends and
can never go below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from extproc.endpoint import Endpoint
from extproc.pool.engine_counters import AdapterSlotState, IdleTime
from extproc.pool.queued_work import QueuedWork, Stage
from extproc.pool.request_tokens import (
    AnswerTokens,
    ContextShare,
    PromptSize,
    SharedContext,
    TypicalWork,
)

#: Adapters remembered as recently used; more than any engine has slots.
_MAX_RECENT = 64


class Turn(Protocol):
    """Prompt whose request is open."""

    def end(self, now: float) -> None:
        """Mark the end of its request."""

    def move(self, account: InflightLoad) -> None:
        """Mark its request as open on another endpoint."""


class InflightLoad(QueuedWork):
    """The open requests of one endpoint incarnation.

    Attributes:
        in_flight: Open requests (count).
        from_peers: Of these, requests of other replicas (count), where replicas exchange them.
        prompt_tokens: Estimated prompt tokens of the open requests.
        active_context_tokens: Context tokens of the open requests, common prefixes counted once,
            with the expected growth of young conversations; 0 while no plugin needs it.
        opened: Reservations ever opened (count).
        answered: Requests closed with an answer (count, cumulative).
        served: Requests with a prompt that this replica sent itself and the endpoint answered.
        answered_s: Seconds that those answered took, summed (cumulative).
        answered_tokens: Their uncached prompt tokens, summed.
        ran: Adapter or model names of requests answered since the last scrape.
        texts: Text prompts answered since the last comparison with the engine's counters:
            [requests, bytes of text] by adapter or model name.
        media_answered: Prompts with media answered since then (count).
        adapters: Open requests by adapter or model name.
        recent: Names of `adapters` ever opened, the latest last.
        adapter_slots: State derived from `adapters` and `recent`; None since they changed.
        typical_work: Typical work of a request, of the whole pool.
        answers: Tokens of an answer, of the whole pool.
        not_found: Requests for a model that were answered with 404 (count, cumulative).
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_idle_s",
        "_idled",
        "_turned_at",
        "active_context_tokens",
        "adapter_slots",
        "adapters",
        "answered",
        "answered_s",
        "answered_tokens",
        "answers",
        "endpoint",
        "from_peers",
        "in_flight",
        "media_answered",
        "not_found",
        "opened",
        "prompt_tokens",
        "ran",
        "recent",
        "served",
        "texts",
        "typical_work",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        typical_work: TypicalWork | None = None,
        answers: AnswerTokens | None = None,
    ) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.typical_work = typical_work or TypicalWork()
        self.answers = answers or AnswerTokens()
        self.in_flight = self.from_peers = self.prompt_tokens = 0
        self.active_context_tokens = 0.0
        self._context = SharedContext()
        self.opened = self.answered = self.served = 0
        self.answered_s = 0.0
        self.answered_tokens = 0
        self._idle_s = self._turned_at = 0.0
        self._idled = 0
        self.ran: set[str] = set()
        self.texts: dict[str, list[int]] = {}
        self.media_answered = 0
        self.not_found = 0
        self.adapters: dict[str, int] = {}
        self.recent: dict[str, None] = {}
        self.adapter_slots: AdapterSlotState | None = None

    def open(
        self,
        target: str,
        prompt_tokens: int,
        *,
        cached_tokens: int,
        now: float,
        prompt_bytes: int = 0,
        blocks: Sequence[int] = (),
        from_peers: bool = False,
        stage: Stage = "",
    ) -> Reservation:
        """Charge a request to the endpoint.

        Args:
            target: Adapter or model name of the request.
            cached_tokens: Of these, tokens predicted to be in the engine's prefix cache.
            prompt_bytes: Bytes of text the tokens are estimated from; 0 when they are exact.
            stage: What the endpoint computes of it; empty for all.
        """
        self.adapter_slots = None
        if not self.in_flight:
            self._idle_s += max(0.0, now - self._turned_at)
            self._turned_at = now
        self.in_flight += 1
        self.from_peers += from_peers
        self.opened += 1
        self.prompt_tokens += prompt_tokens
        self.adapters[target] = self.adapters.get(target, 0) + 1
        if target and target != next(reversed(self.recent), ""):
            self.recent.pop(target, None)
            self.recent[target] = None
            if len(self.recent) > _MAX_RECENT:
                del self.recent[next(iter(self.recent))]
        self._drain(now)
        # Without calls of `max` and `min`, which take as long as the rest: so in `_drain`.
        work = prompt_tokens - cached_tokens if cached_tokens < prompt_tokens else 1
        self.kv_tokens_sent += work
        if stage == "decode":
            work = 1  # the prompt is computed elsewhere, and takes memory here
        self.sent += work
        # By position: a keyword costs more than all of these together.
        reservation = Reservation(
            self,
            target,
            prompt_tokens,
            work,
            self.sent,
            prompt_bytes,
            now,
            self.endpoint,
            blocks,
            from_peers,
            stage,
        )
        self._open[reservation] = None
        return reservation

    def restore(self, requests: int, *, prompt_tokens: int, queued_tokens: int, now: float) -> None:
        """Charge open requests as a record of this account shows them; for a new account.

        Args:
            queued_tokens: Uncached prompt tokens that are not yet computed.
        """
        for at in range(requests):
            tokens = 0 if at else prompt_tokens
            self.open("", tokens, cached_tokens=tokens, now=now)
        self.sent, self.done = queued_tokens, 0.0
        self.kv_tokens_sent = self.kv_tokens_scraped

    def take_ran(self) -> set[str]:
        """Return and forget the names of requests answered since the last call."""
        ran, self.ran = self.ran, set()
        return ran

    def forget_texts(self) -> None:
        """Forget the prompts answered so far: a comparison with the engine's counters begins."""
        self.texts = {}
        self.media_answered = 0

    def cache_adapter_slots(self, state: AdapterSlotState) -> AdapterSlotState:
        """Keep the state until the adapters change, and return it."""
        self.adapter_slots = state
        return state

    def track_context(
        self,
        reservation: Reservation,
        blocks: Sequence[int],
        tokens: Sequence[int],
        *,
        growth: float,
    ) -> None:
        """Count what a request will hold in the cache while it is open.

        Args:
            blocks: Its prompt's chain of block hashes, root first; not empty.
            tokens: Prompt tokens by depth of a chain.
            growth: Tokens its conversation will grow by.
        """
        reservation.context = self._context.open(blocks, tokens, growth=growth)
        self.active_context_tokens = self._context.tokens

    def count_open_blocks(self, chain: Sequence[int]) -> int:
        """Leading blocks of a prompt that open requests have, to a few; 0 while no plugin needs it."""
        return self._context.count_blocks(chain)

    def add_pending(
        self, blocks: Sequence[int], tokens: Sequence[int], *, growth: float
    ) -> ContextShare:
        """Count the context of a request queued for this endpoint; arguments as `track_context`."""
        share = self._context.open(blocks, tokens, growth=growth)
        self.active_context_tokens = self._context.tokens
        return share

    def remove_pending(self, share: ContextShare) -> None:
        """Remove the context of a queued request, which is sent or left."""
        self._context.close(share)
        self.active_context_tokens = self._context.tokens

    @property
    def idle(self) -> IdleTime:
        """Time without open requests."""
        return IdleTime(self._idle_s, math.inf if self.in_flight else self._turned_at, self._idled)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens of open requests that others of them have too; 0 while no plugin needs it."""
        return self._context.shared

    @property
    def own(self) -> int:
        """Open requests that this picker sent (count)."""
        return self.in_flight - self.from_peers

    def count_settled(self, until: float) -> int:
        """Open requests with a prompt that this picker sent, and that are in the engine since then (count)."""
        count = 0
        for reservation in self._open:
            if reservation.entered_at <= until:
                count += bool(reservation.prompt_tokens) and not reservation.from_peers
        return count

    def open_work(self, now: float) -> Iterator[tuple[float, int]]:
        """Seconds that each open request is in the engine, and its uncached prompt tokens."""
        for reservation in self._open:
            entered_at = reservation.entered_at
            if entered_at < math.inf:
                yield now - entered_at, reservation.uncached_tokens

    def _close(self, reservation: Reservation, now: float, *, answered: bool) -> None:
        del self._open[reservation]
        self._prefills.pop(reservation, None)
        self.adapter_slots = None
        self.in_flight -= 1
        if not self.in_flight:
            self._open.clear()  # its empty table stays as large as it was
            self._turned_at = now
            self._idled += 1
        self.from_peers -= reservation.from_peers
        self.prompt_tokens -= reservation.prompt_tokens
        if reservation.context is not None:
            self._context.close(reservation.context)
            self.active_context_tokens = self._context.tokens
        left = self.adapters[reservation.target] - 1
        if left:
            self.adapters[reservation.target] = left
        else:
            del self.adapters[reservation.target]
        self._drain(now)
        if answered:
            self._remember(reservation, now)
        if answered and reservation.stage != "decode":
            self.done = max(self.done, reservation.sent)
        else:
            # Its work is gone, and nothing is known of what was sent before it: it never ran, or
            # passed the prompts that waited, as its own was computed elsewhere.
            self.done = min(self.done + reservation.uncached_tokens, self.sent)

    def _remember_times(self, reservation: Reservation, now: float) -> None:
        """Keep what the duration says; that of a request in stages is not of one endpoint."""
        stage = reservation.stage
        if not stage:
            self.answered += 1
            self.answered_s += now - reservation.at
            self.answered_tokens += reservation.uncached_tokens
            if reservation.prompt_tokens:
                prefill_s = reservation.uncached_tokens / self.tokens_per_s
                self.answers.guess((now - reservation.at - prefill_s) / self.iteration_s)
        elif stage == "decode" and reservation.prefilled_at is not None:
            self.answers.guess((now - reservation.prefilled_at) / self.iteration_s)

    def _remember(self, reservation: Reservation, now: float) -> None:
        """Keep the facts of an answer that estimators read; bounded."""
        self._remember_times(reservation, now)
        if reservation.prompt_tokens:
            if reservation.stage != "decode":
                self.typical_work.add(reservation.uncached_tokens)
            if reservation.stage != "prefill":  # whether its endpoint computed it does not show
                self.served += not reservation.from_peers
        if len(self.ran) < _MAX_RECENT:
            self.ran.add(reservation.target)
        if reservation.stage:
            return
        if reservation.has_media:
            self.media_answered += 1
        elif reservation.prompt_bytes and (
            reservation.target in self.texts or len(self.texts) < _MAX_RECENT
        ):
            texts = self.texts.setdefault(reservation.target, [0, 0])
            texts[0] += 1
            texts[1] += reservation.prompt_bytes


class Reservation(msgspec.Struct, eq=False):
    """The handle of one open request.

    Attributes:
        uncached_tokens: Prompt tokens not in the engine's prefix cache, at least 1.
        sent: `InflightLoad.sent` with this request.
        prompt_bytes: Bytes of text the tokens are estimated from; 0 when they are exact.
        at: Monotonic seconds at which it was opened.
        blocks: The prompt's chain while it may have to be taken back; empty when it stands.
        fallbacks: Other endpoints that were named and may answer in its place.
        refused: Whether it was answered, and not served.
        context: Its share of the cache; None while no plugin needs it.
        last_turn: Marked when it ends; None where no plugin needs it.
        prompt: The same for the events of caches; None without them.
        estimated_tokens: Prompt tokens that the estimate alone predicted as cached; None where they
            are all but the uncached ones.
        stage: What its endpoint computes of the request; empty for all.
        parts: Requests that other endpoints get for this one's stages, until these are over.
        prefilled_at: Monotonic seconds at which another endpoint had computed the prompt; None for
            not, or not yet.
    """

    _account: InflightLoad | None
    target: str
    prompt_tokens: int
    uncached_tokens: int
    sent: float
    prompt_bytes: int
    at: float
    endpoint: Endpoint
    blocks: Sequence[int] = ()
    from_peers: bool = False
    stage: Stage = ""
    last_turn: Turn | None = None
    has_media: bool = False
    estimated_tokens: int | None = None
    fallbacks: Sequence[Endpoint] = ()
    refused: bool = False
    context: ContextShare | None = None
    parts: tuple[Reservation, ...] = ()
    prefilled_at: float | None = None
    prompt: Turn | None = None

    @property
    def is_open(self) -> bool:
        """True until it is closed."""
        return self._account is not None

    @property
    def entered_at(self) -> float:
        """Monotonic seconds since when it is in the engine; infinity where it may not be there.

        A request waits until other endpoints have done its stages, and these may be done long before
        its answer shows it.
        """
        if self.prefilled_at is not None:
            return self.prefilled_at
        return math.inf if self.stage or self.parts else self.at

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the estimate predicted as cached."""
        if self.estimated_tokens is not None:
            return self.estimated_tokens
        return max(0, self.prompt_tokens - self.uncached_tokens)

    def track_turn(self, turn: Turn) -> None:
        """Mark the prompt of its conversation when the request moves or ends."""
        self.last_turn = turn

    def track_prompt(self, prompt: Turn) -> None:
        """Mark its prompt, as it is remembered by the events of caches, when it moves or ends."""
        self.prompt = prompt

    def add_part(self, part: Reservation) -> None:
        """Record a request that another endpoint gets for a stage of this one."""
        self.parts = (*self.parts, part)

    def watch(self) -> None:
        """Close it, a request for prefill alone that is at its engine, once pages show it no more."""
        if self._account is not None:
            self._account.watch_prefill(self)

    def take_parts(self, now: float) -> tuple[Reservation, ...]:
        """Remove and return the requests for stages, which are over."""
        parts, self.parts = self.parts, ()
        if self.stage == "decode":
            self.prefilled_at = now
        return parts

    def allow_fallbacks(self, fallbacks: Sequence[Endpoint]) -> None:
        """Record other endpoints that were named and may answer in place of the first."""
        self.fallbacks = fallbacks

    def set_estimated_tokens(self, tokens: int) -> None:
        """Record what the estimate alone predicted as cached."""
        self.estimated_tokens = tokens

    def note_media(self) -> None:
        """Record that its prompt is not text alone."""
        self.has_media = True

    @property
    def prompt_size(self) -> PromptSize:
        """Size of its prompt."""
        return PromptSize(self.prompt_tokens, self.prompt_bytes, self.has_media)

    def refuse(self, *, not_found: bool = False) -> None:
        """Record that the endpoint answered, and did not serve."""
        self.refused = True
        if not_found and self.target and self._account is not None:
            self._account.not_found += 1

    def forget_blocks(self) -> None:
        """Forget the prompt's chain: its prediction stands, or was retracted."""
        self.blocks = ()

    def close(self, now: float, *, answered: bool = True) -> None:
        """Give back what was charged.

        Args:
            answered: Whether the engine began to answer; False when it was never reached or the
                client left before.

        Raises:
            RuntimeError: The reservation was closed before, which is a bug of the caller.
        """
        account = self._account
        if account is None:
            raise RuntimeError("reservation closed twice; close it in one finally block")
        self._account = None
        if self.last_turn is not None:
            self.last_turn.end(now)
        if self.prompt is not None:
            self.prompt.end(now)
        account._close(self, now, answered=answered)  # noqa: SLF001 - the two halves of one thing

    def move(self, to: InflightLoad, now: float, *, cached_tokens: int) -> None:
        """Charge another endpoint: it answers in place of the one that was chosen.

        Args:
            cached_tokens: Prompt tokens that count as cached there.

        Raises:
            RuntimeError: The reservation was closed before.
        """
        self.close(now, answered=False)
        moved = to.open(
            self.target,
            self.prompt_tokens,
            cached_tokens=cached_tokens,
            now=now,
            from_peers=self.from_peers,
            stage=self.stage,
        )
        to._open[self] = to._open.pop(moved)  # noqa: SLF001 - the two halves of one thing
        self._account, self.endpoint, self.context = to, to.endpoint, None
        self.uncached_tokens, self.sent = moved.uncached_tokens, moved.sent
        if self.last_turn is not None:
            self.last_turn.move(to)
        if self.prompt is not None:
            self.prompt.move(to)
