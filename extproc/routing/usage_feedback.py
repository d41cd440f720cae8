"""Comparison of what was predicted of a request with the usage that its response reports."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.pool.store import PoolStore
from extproc.prefix_cache.cache_model import CacheModel
from extproc.prefix_cache.exact_prefixes import ExactPrefixes


def compare_sizes(store: PoolStore, decision: Decision, usage: Mapping[str, int]) -> None:
    """Learn the tokens of texts and media from the prompt tokens that were reported.

    Args:
        usage: Tokens by kind, as `parsing.usage.read` gives them.
    """
    prompt = usage.get("prompt")
    request = decision.request
    if prompt:
        store.bytes_per_token.observe_usage(
            request.target,
            prompt_bytes=request.prompt_bytes,
            tokens=prompt,
            media=request.media,
            media_tokens=usage.get("media"),
        )


def compare_prefixes(
    store: PoolStore,
    cache_model: CacheModel,
    decision: Decision,
    usage: Mapping[str, int],
    *,
    served: Endpoint,
    exact: ExactPrefixes | None,
) -> None:
    """Learn from the cached tokens that were reported.

    Nothing where another endpoint prefilled, or had blocks to pull: these count as cached as well.

    Args:
        usage: Tokens by kind, as `parsing.usage.read` gives them.
        served: The endpoint that answered.
    """
    prompt, cached = usage.get("prompt"), usage.get("cached")
    stages = decision.disaggregation
    if not prompt or cached is None or (stages is not None and stages.prefill is not None):
        return
    if decision.kv_cache_source is not None:
        return
    if not store.pool.has_incarnation(served):
        return  # it left, and its cache model with it: a late response makes no new one
    predicted = _find_predicted(decision, served)
    if predicted is None:
        return
    if exact is not None and served is decision.endpoints[0]:
        exact.record_usage(decision.match_source, min(predicted, prompt), cached)
    if decision.match_source != "estimate":
        return  # no prediction of the estimate; it is corrected by the counters
    cache_model.observe_usage(
        served, prompt_tokens=prompt, predicted=min(predicted, prompt), cached=cached
    )


def _find_predicted(decision: Decision, served: Endpoint) -> int | None:
    """Prompt tokens a decision predicted as cached on an endpoint; None without prediction."""
    if served is decision.endpoints[0]:
        return decision.matched_tokens
    for c in decision.candidates:
        if c.endpoint.incarnation == served.incarnation and c.endpoint.address == served.address:
            return c.matched_tokens
    return None
