"""Outcomes of routing: a decision, a deferral or a rejection, each with its reasons.

A decision carries every step's survivors and every scorer's scores. Metrics, logs and
`extproc explain` are readers of that one value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from extproc.endpoint import Candidate, Endpoint
from extproc.request import InferenceRequest, RequestBody

#: Keys of a decision whose plugins need none.
NO_KEYS: Mapping[str, str] = {}


class FilterTreeStep(msgspec.Struct, frozen=True, gc=False):
    """One filter on the way through a tree of filters.

    Attributes:
        name: Kind of the filter.
        survivors: Candidates it passed; none where it failed, and then its input goes on.
        branch: Branch that follows: `success`, `failure` or `either`; empty where the walk ends.
        error_type: The type of what it raised, which is a failure; empty when it answered.
    """

    name: str
    survivors: Sequence[Candidate]
    branch: str = ""
    error_type: str = ""


#: Candidates up to which a decision is as small as it need be (count), some 6 kB.
_FEW_CANDIDATES: Final = 16


class FilterResult(msgspec.Struct, frozen=True, gc=False):
    """One filter step: the candidates that it left.

    Attributes:
        name: Kind of the filter.
        branches: The way through it in order, where it is a tree.
    """

    name: str
    survivors: Sequence[Candidate]
    branches: Sequence[FilterTreeStep] = ()


class ScorerResult(msgspec.Struct, frozen=True, gc=False):
    """Raw scores of one scorer, 0..1, aligned with `Decision.scored_candidates`."""

    name: str
    weight: float
    scores: Sequence[float]


class CostResult(msgspec.Struct, frozen=True, gc=False):
    """Cost of each finalist, lower is better, aligned with `Decision.scored_candidates`.

    Attributes:
        name: Kind of the cost model.
        unit: Unit of costs and terms, such as `s`; empty for plain numbers.
        costs: What the picker compared, in `unit`; aligned with `Decision.scored_candidates`.
        terms: Terms of the costs: a name and a number for each scored candidate, in `unit`.
        predict_ttft: Predicts the seconds until a candidate answers with the first token; None
            where the cost model does not.
    """

    name: str
    unit: str
    costs: Sequence[float]
    terms: Sequence[tuple[str, Sequence[float]]] = ()
    predict_ttft: Callable[[Candidate], float] | None = None


class BodyEdit(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a request body that are replaced; everything around them stays as it is.

    Attributes:
        start: Offset of the first byte.
        stop: Byte offset after the last replaced byte; equal to `start` where nothing is removed.
        content: Bytes that replace them.
    """

    start: int
    stop: int
    content: bytes

    @property
    def growth_bytes(self) -> int:
        """Bytes by which the body grows; negative where it shrinks."""
        return len(self.content) - (self.stop - self.start)

    def apply(self, body: RequestBody) -> bytes:
        """A copy of the body with the replacement in it."""
        view = memoryview(body)  # one copy of a body, not two
        return b"".join((view[: self.start], self.content, view[self.stop :]))


#: Source of matched tokens: what was routed before, KV events of the engine, or the larger of both
#: where the events do not say all.
MatchSource: TypeAlias = Literal["estimate", "events", "both"]

#: Stages of a request that other endpoints than the serving one may do.
StageName: TypeAlias = Literal["prefill", "encode"]


class Disaggregation(msgspec.Struct, frozen=True, gc=False):
    """Endpoints that compute parts of a request before the one that serves it.

    Attributes:
        prefill: Decision for the endpoint that computes the prompt; None where the serving one does.
        prefill_reason: Why the serving endpoint computes the prompt, such as `cached`; empty where
            another one does, or prefill is never split.
        encode: Decision for the endpoints that encode images, videos and audio; None where the
            serving one, or that of prefill, does.
        encode_reason: Why no other endpoint does, such as `no-media`; empty as above.
    """

    prefill: Decision | None = None
    prefill_reason: str = ""
    encode: Decision | None = None
    encode_reason: str = ""

    @property
    def choices(self) -> tuple[tuple[StageName, Decision | None, str], ...]:
        """Name, decision and reason of each stage."""
        return (
            ("prefill", self.prefill, self.prefill_reason),
            ("encode", self.encode, self.encode_reason),
        )

    @property
    def parts(self) -> dict[StageName, Decision]:
        """The decisions for stages that other endpoints do."""
        return {name: part for name, part, _ in self.choices if part is not None}

    @property
    def decision_type(self) -> str:
        """`decode-only`, `prefill-decode`, `encode-decode` or `encode-prefill-decode`, as upstream."""
        parts = self.parts
        return "-".join([*reversed(parts), "decode"]) if parts else "decode-only"

    def map_parts(self, change: Callable[[Decision], Decision]) -> Disaggregation:
        """With each decision changed."""
        changed = {name: change(part) for name, part in self.parts.items()}
        return msgspec.structs.replace(self, **changed)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Endpoints in order of preference, and why.

    Attributes:
        endpoints: Endpoints in order of preference, never empty; the first one serves, the others
            are fallbacks for a data plane that can retry (EPP protocol 004, comma list).
        profile: Name of the scheduling profile that ran.
        candidates: Candidates before the first filter.
        excluded_by_model: Endpoints that were not, because they do not serve the model.
        excluded_by_health: Further ones that were not, by reason: `failing`, `warming`, or `probe` where one
            that failed is tried again; `least-bad`, with none, where all are failing.
        model_unlisted: No candidate lists the model; the engine will answer.
        scored_candidates: Candidates that passed all filters.
        scores: Each scorer's result, aligned with `scored_candidates`.
        cost: Cost of each scored candidate; None where the profile has no cost model.
        totals: Totals that the picker compared, higher is better, aligned with `scored_candidates`:
            weighted sums of scores, or negated costs.
        picker: Kind of the picker.
        block_hashes: Chained prefix-block hashes of the prompt; committed to the index of the endpoint.
        matched_tokens: Prompt tokens predicted as cached on the first endpoint.
        answer_headers: Headers to add to the answer, where the data plane shows it to us.
        plugin_keys: Keys by which stateful plugins recognize the request, such as a session; name
            to value.
        degraded: Reason of a degraded decision; empty for a normal one.
        model_rewrite: The name the engine knows the model by, where the client's is another one;
            empty to leave the body alone.
        body_edit: Replacement of the model in the body; None when the body cannot be edited.
        client_model: The client's name for it, which the answer is to say again; empty to leave the
            answer alone.
        pool: Name of the pool, where there are several.
        conversation_stats: Share of continued requests, expected growth (tokens), share of requests
            of other pickers, and idle conversations per open one: of the context, for recordings.
        match_source: Source of `matched_tokens`.
        affinity_seed: Hash by which ties are broken, 32 bits; None where it was not needed.
        disaggregation: Endpoints for parts of the request; None where no profile chooses any.
        kv_cache_source: Endpoint from which the one that computes the prompt pulls cached tokens; None
            for none.
    """

    request: InferenceRequest
    endpoints: Sequence[Endpoint]
    profile: str = "default"
    candidates: Sequence[Candidate] = ()
    filters: Sequence[FilterResult] = ()
    scored_candidates: Sequence[Candidate] = ()
    scores: Sequence[ScorerResult] = ()
    cost: CostResult | None = None
    totals: Sequence[float] = ()
    picker: str = ""
    block_hashes: Sequence[int] = ()
    matched_tokens: int = 0
    answer_headers: Sequence[tuple[str, str]] = ()
    plugin_keys: Mapping[str, str] = NO_KEYS
    degraded: str = ""
    excluded_by_model: Sequence[Endpoint] = ()
    excluded_by_health: Sequence[tuple[str, Sequence[Endpoint]]] = ()
    model_unlisted: bool = False
    model_rewrite: str = ""
    body_edit: BodyEdit | None = None
    client_model: str = ""
    pool: str = ""
    conversation_stats: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    match_source: MatchSource = "estimate"
    affinity_seed: int | None = None
    disaggregation: Disaggregation | None = None
    kv_cache_source: Endpoint | None = None

    @property
    def predicted_ttft_s(self) -> float | None:
        """Predicted seconds from the choice to the first token; None without a prediction.

        The prediction of the endpoint that computes the prompt, without the transfer to another one.
        """
        split = self.disaggregation
        if split is not None and split.prefill is not None:
            return split.prefill.predicted_ttft_s
        predict = None if self.cost is None else self.cost.predict_ttft
        if predict is None:
            return None
        chosen = self.endpoints[0]
        for candidate in self.scored_candidates:
            if candidate.endpoint is chosen:
                return predict(candidate)
        return None

    def find_chosen(self) -> int | None:
        """Position of the first endpoint in `scored_candidates`; None if it is not there."""
        return self._find_scored(self.endpoints[0])

    def _find_scored(self, endpoint: Endpoint) -> int | None:
        address = endpoint.address
        for at, candidate in enumerate(self.scored_candidates):
            known = candidate.endpoint
            if known is endpoint or known.address == address:
                return at
        return None

    def find_chosen_and_runner_up(self) -> tuple[int | None, int | None]:
        """Positions of the first endpoint, and of the highest total but its; None for neither.

        Of equal totals, the second is that of the first fallback.
        """
        totals, scored = self.totals, self.scored_candidates
        if not totals:
            return self.find_chosen(), None
        ordered = sorted(totals)
        value = ordered[-1]
        # Most often the endpoint is that of the first of the highest totals, without a search.
        best_at = totals.index(value)
        is_best = scored[best_at].endpoint is self.endpoints[0]
        chosen = best_at if is_best else self.find_chosen()
        if chosen is None:
            return None, best_at
        if len(ordered) == 1:
            return chosen, None
        if totals[chosen] == value:
            value = ordered[-2]
        fallback = self._find_scored(self.endpoints[1]) if len(self.endpoints) > 1 else None
        if fallback is not None and fallback != chosen and totals[fallback] == value:
            return chosen, fallback
        other = totals.index(value)
        return chosen, other if other != chosen else totals.index(value, chosen + 1)

    def without_candidates(self) -> Decision:
        """With the first endpoint and the runner-up alone of many, and their costs without terms.

        A candidate takes some 300 bytes, and an answer may run for minutes.
        """
        if len(self.candidates) <= _FEW_CANDIDATES:
            return self
        positions = [at for at in self.find_chosen_and_runner_up() if at is not None]
        scored = [self.scored_candidates[at] for at in positions]
        totals = [self.totals[at] for at in positions] if self.totals else ()
        cost, predicted_s, split = self.cost, self.predicted_ttft_s, self.disaggregation
        if cost is not None:
            cost = CostResult(
                cost.name,
                cost.unit,
                [cost.costs[at] for at in positions],
                predict_ttft=None if predicted_s is None else lambda _: predicted_s,
            )
        return msgspec.structs.replace(
            self,
            candidates=scored,
            filters=(),
            scored_candidates=scored,
            scores=[
                msgspec.structs.replace(score, scores=[score.scores[at] for at in positions])
                for score in self.scores
            ],
            cost=cost,
            totals=totals,
            disaggregation=None if split is None else split.map_parts(Decision.without_candidates),
        )

    def without_prompt(self, pool: str = "") -> Decision:
        """Without prompt and blocks, which are as large as the body; `pool` where it names none."""
        request, split = self.request, self.disaggregation
        if request.prompt:
            request = msgspec.structs.replace(request, prompt=b"")
        # By position: `replace` takes six times as long, and every request passes here.
        return Decision(
            request,
            self.endpoints,
            self.profile,
            self.candidates,
            self.filters,
            self.scored_candidates,
            self.scores,
            self.cost,
            self.totals,
            self.picker,
            (),
            self.matched_tokens,
            self.answer_headers,
            self.plugin_keys,
            self.degraded,
            self.excluded_by_model,
            self.excluded_by_health,
            self.model_unlisted,
            self.model_rewrite,
            self.body_edit,
            self.client_model,
            self.pool or pool,
            self.conversation_stats,
            self.match_source,
            self.affinity_seed,
            None if split is None else split.map_parts(Decision.without_prompt),
            self.kv_cache_source,
        )


class DirectResponse(msgspec.Struct, frozen=True, gc=False):
    """An answer that is given in place of an engine's.

    Attributes:
        status: HTTP status, a member of Envoy's StatusCode enum.
        body: JSON.
    """

    status: int
    body: bytes


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """Refusal of a request: the answer to the client, and the reason.

    Attributes:
        status: HTTP status, a member of Envoy's StatusCode enum.
        message: Text for the client; never holds prompt text or secrets.
        reason: Value of `x-llm-d-request-dropped-reason`; empty when the vocabulary has none.
        retry_after_s: Seconds after which trying again may help; None when it will not.
        code: Error code of OpenAI's API; empty derives it from the status.
        cause: Cause for the log, finer than `reason`, such as `rate-limited`; a constant of the
            code, never text of a request.
    """

    status: int
    message: str
    reason: str = ""
    retry_after_s: int | None = None
    code: str = ""
    cause: str = "bad-request"


class Deferral(msgspec.Struct, frozen=True, gc=False):
    """No capacity now: the request waits in a queue, or is rejected where it cannot.

    Attributes:
        retry_in_s: Seconds until capacity may be there; infinity where only an event brings it.
        rejection: Answer to a request that cannot wait, or no longer.
        preferred_endpoint: Address of the endpoint it waits for; empty for any.
        busy_endpoints: Addresses of the endpoints without capacity for it; empty where none was
            checked, or where only the preferred one has none.
        waits_for_slot: Adapters with open requests have the slots of every endpoint.
        is_held: The saturation of its endpoints is at the ceiling of its priority.
    """

    retry_in_s: float
    rejection: Rejection
    preferred_endpoint: str = ""
    busy_endpoints: Sequence[str] = ()
    waits_for_slot: bool = False
    is_held: bool = False


Outcome = Decision | Deferral | Rejection

#: `Rejection.code` of a model that no endpoint serves, as OpenAI's API has it.
MODEL_NOT_FOUND = "model_not_found"

#: Model names listed in a refusal (count), and characters of the requested name.
MAX_NAMES = 20
MAX_NAME_LENGTH = 128


def bad_request(message: str) -> Rejection:
    """A request that can never succeed as it is."""
    return Rejection(400, message)


#: No endpoint may or can serve: 503 (EPP protocol 004, no endpoint communicated).
NO_ENDPOINTS: Final = Rejection(
    503,
    "failed to find endpoint candidates for serving the request",
    reason="rejected-no-endpoints",
    retry_after_s=1,
    cause="no-endpoints",
)

#: No endpoint can serve, and the next one that discovery finds may.
NO_ENDPOINTS_YET: Final = Deferral(math.inf, NO_ENDPOINTS)

#: Endpoints exist, and plugins removed every one of them: 429.
SATURATED: Final = Rejection(
    429,
    "no endpoints available for the given request",
    reason="rejected-saturated",
    retry_after_s=1,
    cause="filtered-out",
)

#: Every endpoint is full, and the request is one that may be dropped: 429.
#: Source: docs/reference/protocol-conformance.md#point-72.
SHEDDABLE_DROPPED: Final = Rejection(
    429,
    "system saturated, sheddable request dropped",
    reason="rejected-saturated",
    retry_after_s=1,
    cause="shed",
)


def model_not_found(name: str, known: Iterable[str]) -> Rejection:
    """No endpoint serves the model, and the models of all are known: 404."""
    names = sorted(known)
    shown = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown += f" and {len(names) - MAX_NAMES} more"
    if len(name) > MAX_NAME_LENGTH:
        name = f"{name[:MAX_NAME_LENGTH]}..."
    return Rejection(
        404,
        f"the model `{name}` does not exist; there are: {shown}",
        code=MODEL_NOT_FOUND,
        cause="unknown-model",
    )


def all_busy(
    retry_in_s: float,
    *,
    preferred_endpoint: str = "",
    busy_endpoints: Sequence[str] = (),
    waits_for_slot: bool = False,
) -> Deferral:
    """A request would wait too long on every endpoint: deferred, or 429."""
    retry_after_s = max(1, round(retry_in_s)) if retry_in_s < math.inf else 1
    return Deferral(
        retry_in_s, _busy(retry_after_s), preferred_endpoint, busy_endpoints, waits_for_slot
    )


@functools.lru_cache(maxsize=64)  # one for every look at a waiting request otherwise
def _busy(retry_after_s: int) -> Rejection:
    return Rejection(
        429,
        "every endpoint is busy",
        reason="rejected-saturated",
        retry_after_s=retry_after_s,
        cause="busy",
    )
