"""Log of the latest decisions and refusals, and what other strategies would have chosen in them.

Comparisons are estimates: a request counts in the state in which it arrived, so what another strategy
would have done to caches and queues before is not in them. A record has no prompt and no headers;
strategies that choose by these are not compared.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import ClassVar, Final, Literal, get_args

import msgspec

from extproc.decision import Decision, Disaggregation, Rejection
from extproc.endpoint import Candidate
from extproc.parsing import surfaces
from extproc.request import MAX_ID_BYTES, shorten_id
from extproc.scheduling import registry
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.scheduling.framework import SchedulingContext, Signal
from extproc.scheduling.profile import SchedulerProfile

#: What engines put in front of the request id, by API, to make the id of an answer.
_ENGINE_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|msg|embd|pool|score|rerank|classify)[-_]")

#: What they append for one of several prompts.
_CHOICE_SUFFIX = re.compile(r"-\d{1,4}$")

#: Characters of an id that needs no check whether it is too long.
_SHORT_ID: Final = MAX_ID_BYTES // 4

#: Of responses that were not read.
NO_USAGE: Mapping[str, int] = {}

#: Results of recorded requests: `refused` is the picker's, `failed` has a status of 400 or more, or
#: none at its end.
RequestResult = Literal["open", "ok", "failed", "refused"]
RESULTS: Final[Sequence[str]] = get_args(RequestResult)


class DecisionRecord:
    """One decision and the result of its request.

    Attributes:
        id: Request id, shortened in the log.
        at: Monotonic seconds of the decision.
        decision: In the log without prompt and blocks, and with few candidates where the log dropped
            it open.
        status: HTTP status of the answer; empty while there is none.
        seconds: Seconds from the first event to the end of the stream; None while it is open.
        usage: Tokens the engine reported, by kind.
        trace_id: Sampled trace that it belongs to; empty without one.
        headers_s: Seconds from the choice of the endpoint to response headers; None without any.
        first_token_s: Seconds from the choice of the endpoint to the first chunk of a stream, or to
            the headers of another response; None where chunks are not shown.
        answer_ids: Ids that the headers and the body of the answer have.
        sequence: Number of the record in its log, from 1; unset outside of one.
    """

    # No struct, whose fields are written by a call each; the interpreter writes slots itself.
    __slots__ = (
        "answer_ids",
        "at",
        "decision",
        "first_token_s",
        "headers_s",
        "id",
        "seconds",
        "sequence",
        "status",
        "trace_id",
        "usage",
    )

    sequence: int

    def __init__(self, request_id: str, at: float, decision: Decision) -> None:
        self.id, self.at, self.decision = request_id, at, decision
        self.status = self.trace_id = ""
        self.seconds: float | None = None
        self.usage = NO_USAGE
        self.headers_s: float | None = None
        self.first_token_s: float | None = None
        self.answer_ids: tuple[str, ...] = ()

    @property
    def result(self) -> RequestResult:
        """Result of the request; `ok` also where its response is not observed."""
        if self.seconds is None:
            return "open"
        if not self.status:
            return "ok" if self.decision.request.api in surfaces.UNOBSERVED else "failed"
        return "ok" if self.status < "400" else "failed"

    def add_answer_ids(self, ids: Sequence[str]) -> None:
        """Add ids that the headers or the body of the answer have."""
        self.answer_ids = (*self.answer_ids, *ids)


class RejectionRecord(msgspec.Struct, eq=False):
    """One refused request.

    Attributes:
        at: Monotonic seconds of the rejection.
        model: Model or adapter; empty where unknown.
        rejection: Response to the client, and its cause.
        trace_id: Sampled trace that it belongs to; empty without one.
        sequence: Number of the record in its log, from 1; 0 outside of one.
    """

    id: str
    at: float
    pool: str
    model: str
    rejection: Rejection
    trace_id: str = ""
    sequence: int = 0
    result: ClassVar[RequestResult] = "refused"


class DecisionLog:
    """Bounded ring of decisions, and another one of refused requests.

    Clients may send the same id again, so each record has a sequence number of its own.

    Args:
        capacity: Decisions kept, and refused requests (count each); 0 keeps none.
        most_candidates: Candidates kept, summed over decisions (count); some 500 bytes each.

    A quarter as many more, of both, may wait to be freed.
    """

    def __init__(self, capacity: int, *, most_candidates: int = 20_000) -> None:
        self._capacity = capacity
        self._most = most_candidates
        self._ring: list[DecisionRecord] = []
        self._rejections: deque[RejectionRecord] = deque()
        self._next_sequence = 1
        # Candidates by decision of the ring, and their sum.
        self._weights: list[int] = []
        self._weight = 0
        self._dropped: list[DecisionRecord] = []
        self._settle: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        self._settle()
        return len(self._ring)

    def before_reading(self, settle: Callable[[], None]) -> None:
        """Let `settle` add decisions that wait, whenever the log is read."""
        self._settle = settle

    def resize(self, capacity: int) -> None:
        """Keep another number of decisions and of refused requests; older ones go at once."""
        self._capacity = capacity
        self._trim()
        self._trim_rejections()

    def add(self, request_id: str, decision: Decision, now: float) -> DecisionRecord:
        """Adds a decision."""
        record = DecisionRecord(request_id, now, decision.without_prompt())
        self.extend([record])
        return record

    def extend(self, records: Sequence[DecisionRecord]) -> None:
        """Adds decisions without prompt and blocks, as `add` does."""
        for sequence, record in enumerate(records, self._next_sequence):
            record.sequence = sequence
            if len(record.id) > _SHORT_ID:
                record.id = shorten_id(record.id)
        self._next_sequence += len(records)
        if not self._capacity:
            return
        added = _weigh(records)
        self._ring += records
        self._weights += added
        self._weight += sum(added)
        self._trim()

    def _trim(self) -> None:
        """Drop the oldest decisions beyond the bounds."""
        ring, weights = self._ring, self._weights
        num_dropped = max(0, len(ring) - self._capacity)
        weight = self._weight - sum(weights[:num_dropped])
        while weight > self._most and num_dropped < len(ring) - 1:
            weight -= weights[num_dropped]
            num_dropped += 1
        dropped = ring[:num_dropped]
        for record in dropped:
            if record.seconds is None:
                record.decision = record.decision.without_candidates()
        is_few = 4 * num_dropped <= self._capacity and 4 * sum(weights[:num_dropped]) <= self._most
        self._dropped = dropped if is_few else []
        del ring[:num_dropped], weights[:num_dropped]
        self._weight = weight

    def free_dropped(self) -> None:
        """Frees a decision that the ring dropped; before a request that makes another one.

        Its memory comes into the caches when it is freed, and the decision to come takes it. Where all are
        freed at once, it has left them before it is taken.
        """
        if self._dropped:
            self._dropped.pop()

    def add_rejection(self, record: RejectionRecord) -> None:
        """Adds a refused request."""
        record.sequence = self._next_sequence
        self._next_sequence += 1
        self._rejections.append(record)
        self._trim_rejections()

    def _trim_rejections(self) -> None:
        while len(self._rejections) > self._capacity:
            self._rejections.popleft()

    def find(
        self, request_id: str | None, *, result: str = "", sequence: int | None = None
    ) -> DecisionRecord | RejectionRecord | None:
        """Returns the newest record of a request; None when it is no longer in a ring.

        Args:
            request_id: The `x-request-id`, or the id in the body of the answer that an engine makes
                of it, such as `chatcmpl-` and the request id; or an id that the engine made up
                for its answer, where it was shown; or the id of a sampled trace. None for any.
            result: Result of the record, as a retry has the id of the request; empty for any.
            sequence: Sequence number of the record; None for any.
        """
        records = [
            record
            for record in self.latest()
            if result in ("", record.result) and sequence in (None, record.sequence)
        ]
        if request_id is None:
            return next(iter(records), None)
        for name in _spellings(request_id):
            key = shorten_id(name)
            for record in records:
                if record.id == key:
                    return record
        return next((record for record in records if _is_called(record, request_id)), None)

    def list_same_id(self, record: DecisionRecord | RejectionRecord) -> list[int]:
        """Lists the sequence numbers of all records with the id of one, newest first."""
        return [other.sequence for other in self.latest() if other.id == record.id]

    def latest(self, count: int | None = None) -> Iterator[DecisionRecord | RejectionRecord]:
        """Returns the latest records, newest first; all of them without a count."""
        self._settle()
        rings: list[Iterator[DecisionRecord | RejectionRecord]] = [
            reversed(self._ring),
            reversed(self._rejections),
        ]
        newest_first = heapq.merge(*rings, key=lambda record: -record.at)
        return itertools.islice(newest_first, count)


def _spellings(request_id: str) -> Iterator[str]:
    """Returns the request ids that an id may stand for, the most literal first.

    Bytes of headers are read as latin-1, and an id that is looked up may be the same in UTF-8.
    """
    for name in (request_id, request_id.encode(errors="replace").decode("latin-1")):
        yield name
        bare = _ENGINE_PREFIX.sub("", name)
        yield bare
        yield _CHOICE_SUFFIX.sub("", bare)


def _is_called(record: DecisionRecord | RejectionRecord, name: str) -> bool:
    """True for the id of its trace, or one of its answer."""
    if not name:
        return False
    ids = record.answer_ids if isinstance(record, DecisionRecord) else ()
    return record.trace_id == name or name in ids


def _weigh(records: Sequence[DecisionRecord]) -> list[int]:
    """Candidates and endpoints that requests may go to, by decision (count)."""
    return [
        len(known.candidates)
        + (0 if known.request.subset is None else len(known.request.subset))
        + (0 if known.disaggregation is None else _weigh_stages(known.disaggregation))
        for record in records
        for known in (record.decision,)
    ]


def _weigh_stages(stages: Disaggregation) -> int:
    """Candidates of stages: their filters and scores are their own."""
    return sum(len(part.candidates) for part in stages.parts.values())


#: Strategies that need neither prompt nor headers; `adaptive` reads the first message to settle ties.
COMPARED: Final = ("adaptive", "balanced", "weighted", "lmetric", "least-request", "round-robin")

#: Filters that read labels alone, such as those of roles.
_LABEL_FILTERS: Final = frozenset(
    kind
    for kind, plugin in registry.FILTERS.items()
    if getattr(plugin, "needs", None) == {Signal.LABELS}
)

#: Blocks of a prompt whose cached part is known: costs read that there are some.
_KNOWN_BLOCKS: Final = (0,)


class StrategyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of one strategy.

    Attributes:
        name: Name of the strategy; for the recorded choices the names of their profiles, which reloads
            and pools can make several.
        is_as_routed: Whether these are the recorded choices.
        agreement_ratio: Share of requests for which it names the endpoint that was chosen, 0..1.
        first_token_s: Mean predicted seconds from the choice to the first token.
        cached_ratio: Share of prompt tokens predicted as cached on its choices, 0..1.
        max_share: Share of requests on the endpoint that it names most often, 0..1.
        num_endpoints: Endpoints that it names.
    """

    name: str
    is_as_routed: bool
    agreement_ratio: float
    first_token_s: float
    cached_ratio: float
    max_share: float
    num_endpoints: int


class _Tally:
    """Sums over the choices of one strategy."""

    def __init__(self) -> None:
        self.choices: Counter[str] = Counter()
        self.agreed = 0
        self.first_token_s = 0.0
        self.cached_tokens = 0
        self.prompt_tokens = 0

    def add(
        self, address: str, decision: Decision, first_token_s: float, cached_tokens: int
    ) -> None:
        self.choices[address] += 1
        self.agreed += address == decision.endpoints[0].address
        self.first_token_s += first_token_s
        self.cached_tokens += cached_tokens
        self.prompt_tokens += decision.request.prompt_tokens

    def result(self, name: str, *, is_as_routed: bool = False) -> StrategyResult:
        count = max(1, self.choices.total())
        return StrategyResult(
            name=name,
            is_as_routed=is_as_routed,
            agreement_ratio=self.agreed / count,
            first_token_s=self.first_token_s / count,
            cached_ratio=self.cached_tokens / max(1, self.prompt_tokens),
            max_share=max(self.choices.values(), default=0) / count,
            num_endpoints=len(self.choices),
        )


class StrategyComparison:
    """Comparison of strategies on decisions that are added in their order."""

    def __init__(self) -> None:
        profiles = registry.profiles()
        self._profiles = {name: profiles[name] for name in COMPARED}
        self._tallies = {name: _Tally() for name in COMPARED}
        self._actual = _Tally()
        self._names: dict[str, None] = {}
        self._cost, self._rng = EstimatedTime(), Random(0)

    def add(self, record: DecisionRecord) -> None:
        """Decide a recorded request by each strategy."""
        decision = record.decision
        if not decision.candidates:  # a rescue, of which nothing else is known
            return
        candidates = _find_eligible(decision)
        context = SchedulingContext(
            request=decision.request,
            now=record.at,
            rng=self._rng,
            blocks=_KNOWN_BLOCKS,
            adapter=decision.request.adapter,
        )
        predict = self._cost.cost(context, candidates).predict_ttft
        if predict is None:
            return
        by_address = {
            candidate.endpoint.address: (predict(candidate), candidate.matched_tokens)
            for candidate in candidates
        }
        chosen = decision.endpoints[0].address
        if chosen not in by_address:
            return
        self._names[decision.profile] = None
        self._actual.add(chosen, decision, *by_address[chosen])
        for name, profile in self._profiles.items():
            address = _choose(profile, context, candidates)
            if address:
                self._tallies[name].add(address, decision, *by_address[address])

    @property
    def num_requests(self) -> int:
        """Requests that were compared: those of which more than the endpoint is known."""
        return self._actual.choices.total()

    def results(self) -> list[StrategyResult]:
        """Results of the recorded choices, then of all strategies; none without requests."""
        if not self._names:
            return []
        actual = self._actual.result(", ".join(self._names), is_as_routed=True)
        return [actual, *(tally.result(name) for name, tally in self._tallies.items())]


def _find_eligible(decision: Decision) -> Sequence[Candidate]:
    """Candidates that no filter by labels excluded: those of another stage suit no strategy."""
    excluded: set[str] = set()
    before = decision.candidates
    for step in decision.filters:
        if step.name in _LABEL_FILTERS:
            excluded.update(candidate.endpoint.address for candidate in before)
            excluded.difference_update(candidate.endpoint.address for candidate in step.survivors)
        before = step.survivors
    if not excluded:
        return decision.candidates
    return [c for c in decision.candidates if c.endpoint.address not in excluded]


def _choose(
    profile: SchedulerProfile, context: SchedulingContext, candidates: Sequence[Candidate]
) -> str:
    """Address that a strategy chooses; empty where it refuses the request."""
    outcome = profile.run(context, candidates)
    if not isinstance(outcome, Decision):
        return ""
    for observer in profile.observers:
        observer.on_committed(outcome, context.now)
    return outcome.endpoints[0].address
