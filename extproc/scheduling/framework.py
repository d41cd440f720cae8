"""Plugin interfaces: filters, scorers, cost models, pickers and their optional roles.

Plugins are structural: a class with these members fits, wherever it comes from. Its parameters are
its own fields, frozen, with units in their names and defaults with a reason. Scorers, filters and
pickers read candidates and never change them. Scorers share the normalization of values to scores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import Annotated, ClassVar, Final, Protocol, runtime_checkable

import msgspec

from extproc.decision import CostResult, Decision, FilterTreeStep
from extproc.endpoint import Candidate, Endpoint
from extproc.request import InferenceRequest, hash_affinity_key


class Signal(Enum):
    """Part of a candidate that a plugin reads; `extproc check` compares it with the scrapes."""

    WAITING = "waiting"
    RUNNING = "running"
    KV_USAGE = "kv_usage"
    ADAPTERS = "adapters"
    IN_FLIGHT = "in_flight"
    PREFIX = "prefix"
    QUEUED = "queued"
    RATES = "rates"
    RESIDENCY = "residency"
    FIRST_USER_MESSAGE = "first_user_message"
    HEADERS = "headers"
    LABELS = "labels"
    CONVERSATIONS = "conversations"
    EXTRA = "extra"


class PluginParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a plugin are its fields; a configuration names no others."""


#: Parameters with a range: a share, and numbers that are not negative.
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]

#: Name of a header in lower case (RFC 9110, 5.1).
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")

#: Headers that say how a response is framed or sent, and not what it is (RFC 9110, 7.6.1 and 8.6).
_FRAMING_HEADERS: Final = frozenset(
    {
        *("connection", "content-length", "host", "keep-alive", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade"),
    }
)


def is_response_header(name: str) -> bool:
    """True for a name, in lower case, of a header that a plugin may add to responses."""
    return bool(_HEADER_NAME.fullmatch(name)) and name not in _FRAMING_HEADERS


def check_response_header(name: str) -> None:
    """Refuse what is no name of a header for responses, in letters of any case.

    Raises:
        ValueError: It is none.
    """
    if not is_response_header(name.lower()):
        raise ValueError(
            f"expected the name of a header for responses, such as x-session-token, got {name!r}"
        )


class UpstreamParameters(PluginParameters, frozen=True, rename="camel"):
    """Parameters of a plugin that the upstream picker has, by the names it gives them."""

    #: Go reads null as an absent key.
    NULL_IS_ABSENT: ClassVar[bool] = True


class BypassedError(Exception):
    """A plugin is bypassed for a while, because it overran its time before."""


class Plugin(Protocol):
    """Common interface of all plugins."""

    @property
    def kind(self) -> str:
        """Its name in the catalogue, kebab-case; unique among filters, scorers or pickers."""

    @property
    def needs(self) -> frozenset[Signal]:
        """The signals it reads."""


class Filter(Plugin, Protocol):
    """Removes candidates that must not serve."""

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Keep some of the candidates, in their order; keeping none refuses the request."""


@runtime_checkable
class TracedFilter(Protocol):
    """A filter that runs others and can say which."""

    def walk(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], Sequence[FilterTreeStep]]:
        """Filter as `filter` does, and return the branches taken as well."""


class Scorer(Plugin, Protocol):
    """Judges one quality of every candidate."""

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        """Score in 0..1, higher is better, one for each candidate in their order."""


class CostModel(Plugin, Protocol):
    """Judges every candidate in one unit; takes the place of the scorers."""

    def cost(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> CostResult:
        """Cost of each candidate in their order, lower is better; finite."""


@runtime_checkable
class Observer(Protocol):
    """A plugin with a memory: any filter, scorer, cost model or picker may be one."""

    def on_committed(self, decision: Decision, now: float) -> None:
        """A decision of its profile was committed: the first endpoint got the request."""


@runtime_checkable
class MoveObserver(Observer, Protocol):
    """A built-in observer that corrects its memory where the data plane took a fallback."""

    def on_moved(self, decision: Decision, served: Endpoint, now: float) -> None:
        """A committed decision was answered by another endpoint than its first."""


@runtime_checkable
class RequestKeyProvider(Protocol):
    """An observer that remembers by something a decision does not hold, such as a header."""

    def keys(self, context: SchedulingContext) -> Mapping[str, str]:
        """Keys it needs when the decision is committed; they become `Decision.plugin_keys`."""


@runtime_checkable
class ResponseHeaderProvider(Protocol):
    """A plugin that tells the client something: any filter, scorer or picker may be one."""

    def answer_headers(
        self, context: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """Headers for the answer, names in lower case, now that `chosen` serves."""


@runtime_checkable
class SaturationDetector(Protocol):
    """A built-in filter that knows when an endpoint is full: requests below priority 0 are dropped then."""

    def is_saturated(self, candidate: Candidate) -> bool:
        """True if the endpoint has no room; False where unknown."""


@runtime_checkable
class ExtraMetricReader(Protocol):
    """A plugin whose parameters name extra metrics, so that the configuration can be checked."""

    @property
    def extra_metrics(self) -> frozenset[str]:
        """The names of `scrape.extra_metrics` that it reads."""


class Picker(Plugin, Protocol):
    """Chooses the endpoint, and its fallbacks, among the scored candidates."""

    def pick(
        self,
        context: SchedulingContext,
        candidates: Sequence[Candidate],
        totals: Sequence[float],
        *,
        count: int,
    ) -> list[int]:
        """Choose up to `count` different candidates.

        Args:
            candidates: Never empty.
            totals: Weighted sums of the scores, or negated costs, aligned with `candidates`.
            count: Endpoints to return, at least 1.

        Returns:
            Positions in `candidates`, in order of preference.
        """


#: Headers of a request without any.
NO_HEADERS: Mapping[str, str] = {}


def _unread(_: InferenceRequest) -> str | bytes:
    return ""


class SchedulingContext(msgspec.Struct, frozen=True, gc=False):
    """Input of every plugin besides the candidates.

    Attributes:
        request: The parsed request.
        now: Monotonic seconds, the same from the first filter to the pick.
        rng: The only source of chance; the same seed gives the same picks.
        headers: Headers of the request, names in lower case.
        blocks: The prompt's chain of prefix-block hashes, root first; empty where no plugin reads it.
        first_user_message_reader: Reads the beginning of the first user message out of the request, as
            text or as its bytes in UTF-8.
        adapter: The requested adapter, named apart from its model or known to be one; empty for a
            base model. Where `request.adapter` is empty, this is `request.model` or empty.
        continuation_ratio: Share of requests that continue an earlier one, 0..1. This and the
            following are 0 unless a plugin needs `Signal.CONVERSATIONS`.
        expected_growth_tokens: Tokens by which this conversation will grow.
        foreign_share: Share of the requests in the engines that other replicas sent, 0..1.
        idle_conversations_per_open: Conversations that will continue and have no request open now,
            for each open request.
        known_seed: Result of `affinity_seed` where it was needed before; None has it read at next use.
        peer: Endpoint chosen for decode, where a profile chooses the endpoint of another stage; None
            for the one that serves.
    """

    request: InferenceRequest
    now: float
    rng: Random
    headers: Mapping[str, str] = NO_HEADERS
    blocks: Sequence[int] = ()
    first_user_message_reader: Callable[[InferenceRequest], str | bytes] = _unread
    adapter: str = ""
    continuation_ratio: float = 0.0
    expected_growth_tokens: float = 0.0
    foreign_share: float = 0.0
    idle_conversations_per_open: float = 0.0
    known_seed: int | None = None
    peer: Endpoint | None = None

    @property
    def first_user_message(self) -> str:
        """Beginning of the first user message; empty unless `Signal.FIRST_USER_MESSAGE` is needed.

        Read at first use: most decisions need no tie broken.
        """
        text = self.first_user_message_reader(self.request)
        return text if isinstance(text, str) else text.decode()

    @property
    def affinity_seed(self) -> int | None:
        """Hash of the session, else of the first user message, 32 bits; None without either.

        It stays the same from turn to turn of a conversation.
        """
        if self.known_seed is not None:
            return self.known_seed
        key = self.request.session or self.first_user_message_reader(self.request)
        if not key:
            return None
        seed = hash_affinity_key(key)
        msgspec.structs.force_setattr(self, "known_seed", seed)  # recordings need it, too
        return seed


#: Score of every candidate when no value is known.
NEUTRAL = 0.5


def impute_mean(values: Sequence[float | None]) -> Sequence[float] | None:
    """Put the mean of the known values in the place of the unknown ones.

    An unknown endpoint is thus neither the best nor the worst: it draws its share of requests and
    no more.

    Args:
        values: A value for each candidate, in any unit; None if it is unknown.

    Returns:
        The values without gaps; None when none is known.
    """
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        return known
    if not known:
        return None
    mean = sum(known) / len(known)
    return [mean if value is None else value for value in values]


def min_max_inverted(values: Sequence[float | None]) -> list[float]:
    """`(high - v) / (high - low)`, low and high the extremes of the values; all equal scores 1.

    Args:
        values: A value for each candidate, lower is better. Unknown values count as the mean of the
            known ones; when none is known all score `NEUTRAL`.
    """
    known = impute_mean(values)
    if not known:
        return [NEUTRAL] * len(values)
    low, high = min(known), max(known)
    if low == high:
        return [1.0] * len(known)
    span = high - low
    return [(high - value) / span for value in known]


def share(part: float, total: float) -> float:
    """`part / total`, cut to 0..1; 0 where the total is 0."""
    return min(1.0, max(0.0, part / total)) if total > 0 else 0.0
