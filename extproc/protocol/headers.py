"""Header names of the contract (docs/spec/protocol.md#header-names)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from extproc.decision import BodyEdit, Decision
from extproc.request import HttpRequest

#: Endpoints that a subset hint may name (count).
MAX_SUBSET_ENDPOINTS: Final = 16_384

DESTINATION = "x-gateway-destination-endpoint"
#: Data-parallel rank that serves the request, for engines with several behind their port: vLLM and
#: SGLang read it.
DATA_PARALLEL_RANK = "x-data-parallel-rank"
#: Endpoints that the sidecar of the chosen endpoint asks to compute the prompt, to encode media, and
#: for cached blocks of the prompt.
PREFILLER = "x-prefiller-host-port"
ENCODERS = "x-encoder-hosts-ports"
KV_CACHE_SOURCE = "x-kv-cache-source-host-port"
SCORES = "x-gateway-destination-endpoint-scores"
COST = "x-gateway-inference-request-cost"
SELECTION = "test-epp-endpoint-selection"
SERVED_HEADER = "x-conformance-test-served-endpoint"
RESPONSE_MARKER = ("x-went-into-resp-headers", "true")

#: Headers that pickers set for engines behind a disaggregation sidecar (prefill, encode, KV
#: transfer, data-parallel rank). A client that set one would have an engine connect to any address.
SIDECAR_HEADERS = frozenset(
    {
        "x-data-parallel-host-port",
        DATA_PARALLEL_RANK,
        ENCODERS,
        KV_CACHE_SOURCE,
        PREFILLER,
    }
)

#: Headers that must not reach the engine: those that steer a picker, and those that a client has no
#: business to send to engines. The destination is overwritten.
CONTROL_HEADERS = SIDECAR_HEADERS | frozenset(
    {
        SELECTION,
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-gateway-inference-fairness-id",
        "x-gateway-inference-objective",
        "x-gateway-model-name-rewrite",
        "x-llm-d-inference-fairness-id",
        "x-llm-d-inference-objective",
        "x-llm-d-model-name-rewrite",
        "x-llm-d-request-dropped-reason",
        "x-llm-d-slo-ttft-ms",
        "x-llm-d-slo-tpot-ms",
        "x-slo-ttft-ms",
        "x-slo-tpot-ms",
    }
)


def steer_engine(
    decision: Decision, sent: Collection[str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The headers to set for the engine and its sidecar, and the control headers to remove.

    Those are the rank, and the endpoints of prefill, encode and the KV cache.

    Args:
        sent: Names of the headers that the client sent.
    """
    removed = CONTROL_HEADERS.intersection(sent)
    rank, stages = decision.endpoints[0].rank, decision.disaggregation
    source = decision.kv_cache_source
    if rank is None and stages is None and source is None:
        return (), tuple(removed)
    set_headers: list[tuple[str, str]] = []
    if rank is not None:
        set_headers.append((DATA_PARALLEL_RANK, str(rank.index)))
    if stages is not None and stages.prefill is not None:
        set_headers.append((PREFILLER, stages.prefill.endpoints[0].host_port))
    if stages is not None and stages.encode is not None:
        encoders = [endpoint.host_port for endpoint in stages.encode.endpoints]
        set_headers.append((ENCODERS, ",".join(encoders)))
    if source is not None:
        set_headers.append((KV_CACHE_SOURCE, source.host_port))
    return tuple(set_headers), tuple(removed.difference([name for name, _ in set_headers]))


def edited_length(raw: HttpRequest, edit: BodyEdit) -> tuple[tuple[str, str], ...]:
    """The `content-length` of an edited body (docs/spec/protocol.md#request-flow).

    Of a body that BUFFERED_PARTIAL cut the rest follows; without a length of the whole there is
    nothing to correct.
    """
    if raw.truncated:
        return changed_length(raw.headers.get("content-length", ""), edit.growth_bytes)
    return (("content-length", str(len(raw.body) + edit.growth_bytes)),)


def changed_length(length: str, growth_bytes: int) -> tuple[tuple[str, str], ...]:
    """The `content-length` header after a change of size; empty without one before.

    Args:
        length: The length before, as its header says it.
        growth_bytes: Change of the length in bytes; negative if it is shorter now.
    """
    if not is_length(length):
        return ()
    return (("content-length", str(int(length) + growth_bytes)),)


def is_length(value: str) -> bool:
    """True if a `content-length` is a number of at most 15 digits, a petabyte."""
    return len(value) <= 15 and value.isascii() and value.isdigit()


def tokens(value: str) -> tuple[str, ...]:
    """The first `MAX_SUBSET_ENDPOINTS` non-empty members of a comma-separated value, trimmed."""
    stripped = [
        token.strip() for token in value.split(",", MAX_SUBSET_ENDPOINTS)[:MAX_SUBSET_ENDPOINTS]
    ]
    return tuple(token for token in stripped if token)


def endpoint_scores(decision: Decision) -> tuple[tuple[str, float], ...]:
    """Score of each finalist, the best of its ranks, higher is better; empty without a comparison."""
    if not decision.scores and decision.cost is None:
        return ()
    scores: dict[str, float] = {}
    for candidate, total in zip(decision.scored_candidates, decision.totals, strict=True):
        host_port = candidate.endpoint.host_port
        scores[host_port] = max(total, scores.get(host_port, total))
    return tuple(scores.items())
