"""Outcomes of a scheduling turn: a decision or a rejection, each with its reasons.

A decision carries every step's survivors and every scorer's scores. Metrics, logs and
`extproc explain` are readers of that one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from extproc.endpoint import Candidate, Endpoint
from extproc.request import Request

#: Keys of a decision whose plugins asked for none.
NO_KEYS: Mapping[str, str] = {}


class Filtered(msgspec.Struct, frozen=True, gc=False):
    """One filter step: who was still in play after it."""

    name: str
    survivors: Sequence[Candidate]


class Scored(msgspec.Struct, frozen=True, gc=False):
    """One scorer's raw scores (0..1, higher is better), aligned with `Decision.finalists`."""

    name: str
    weight: float
    scores: Sequence[float]


class Priced(msgspec.Struct, frozen=True, gc=False):
    """What each finalist would cost, lower is better, aligned with `Decision.finalists`.

    Attributes:
        name: Which cost model.
        unit: Unit of costs and terms, such as `s`; empty for plain numbers.
        costs: What the picker compared.
        terms: What they are made of: a name and one number for each finalist.
    """

    name: str
    unit: str
    costs: Sequence[float]
    terms: Sequence[tuple[str, Sequence[float]]] = ()


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Endpoints in order of preference, and why.

    Attributes:
        request: What was asked.
        endpoints: In order of preference, never empty; the first one serves, the others are
            fallbacks for a data plane that can retry (EPP protocol 004, comma list).
        profile: Name of the scheduling profile that ran.
        candidates: Who was in play before the first filter.
        filters: Each filter step in order.
        finalists: Who was scored.
        scores: Each scorer's result, aligned with `finalists`.
        priced: What each finalist would cost, where the profile has a cost model.
        totals: What the picker compared, higher is better, aligned with `finalists`: weighted sums
            of scores, or negated costs.
        picker: Which picker chose.
        blocks: Chained prefix-block hashes of the prompt; committed to the index of the endpoint.
        matched_tokens: Prompt tokens believed cached on the first endpoint.
        answer_headers: Headers to add to the answer, where the data plane shows it to us.
        keys: What plugins with a memory know the request by, such as a session; name to value.
        degraded: Why the ordinary way could not be taken; empty when it was.
    """

    request: Request
    endpoints: Sequence[Endpoint]
    profile: str = "default"
    candidates: Sequence[Candidate] = ()
    filters: Sequence[Filtered] = ()
    finalists: Sequence[Candidate] = ()
    scores: Sequence[Scored] = ()
    priced: Priced | None = None
    totals: Sequence[float] = ()
    picker: str = ""
    blocks: Sequence[int] = ()
    matched_tokens: int = 0
    answer_headers: Sequence[tuple[str, str]] = ()
    keys: Mapping[str, str] = NO_KEYS
    degraded: str = ""


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """A refusal: what the client is told and why.

    Attributes:
        status: HTTP status, a member of Envoy's StatusCode enum.
        message: For the client; never holds prompt text or secrets.
        reason: Value of `x-llm-d-request-dropped-reason`; empty when the vocabulary has none.
        retry_after_s: Seconds after which trying again may help; None when it will not.
    """

    status: int
    message: str
    reason: str = ""
    retry_after_s: int | None = None


Outcome = Decision | Rejection

#: The upstream error vocabulary (EPP protocol report 1.8): status to code name.
CODES: Mapping[int, str] = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    412: "PreconditionFailed",
    413: "PayloadTooLarge",
    429: "ResourceExhausted",
    500: "Internal",
    503: "ServiceUnavailable",
}


def bad_request(message: str) -> Rejection:
    """A request that can never succeed as it is."""
    return Rejection(400, message)


def no_endpoints() -> Rejection:
    """Nobody may or can serve: 503 (EPP protocol 004, no endpoint communicated)."""
    return Rejection(
        503,
        "failed to find endpoint candidates for serving the request",
        reason="rejected-no-endpoints",
        retry_after_s=1,
    )


def saturated() -> Rejection:
    """Endpoints exist, and plugins removed every one of them: 429."""
    return Rejection(
        429,
        "no endpoints available for the given request",
        reason="rejected-saturated",
        retry_after_s=1,
    )
