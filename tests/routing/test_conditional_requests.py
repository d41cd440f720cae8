"""Requests with `Prefer: if-available`, which run only where their prefix is cached."""

from __future__ import annotations

import json

import pytest

from extproc.decision import Decision, Rejection
from extproc.request import HttpRequest
from tests.support.pool_fixture import PoolFixture, load

CONDITIONAL = {"prefer": "if-available"}


def build_request(headers: dict[str, str], text: str = "x" * 4000) -> HttpRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return HttpRequest({":path": "/v1/chat/completions", **headers}, json.dumps(body).encode())


def build_pool(profile: str = "balanced") -> PoolFixture:
    return PoolFixture({"10.0.0.1:1": load(0, 0.0), "10.0.0.2:1": load(0, 0.0)}, profile=profile)


def send(pool: PoolFixture, text: str = "x" * 4000) -> None:
    """Route a request without a condition, so that its prompt counts as cached."""
    decision = pool.decide(build_request({}, text))
    assert isinstance(decision, Decision)
    pool.director.reserve(decision, pool.now)


def test_a_conditional_request_needs_a_cached_prefix():
    """It is refused until an endpoint that is chosen for it was sent its prefix."""
    pool = build_pool()
    refused = pool.decide(build_request(CONDITIONAL))
    assert isinstance(refused, Rejection)
    assert (refused.status, refused.cause) == (412, "not-cached")
    assert refused.retry_after_s is None
    send(pool)
    served = pool.decide(build_request(CONDITIONAL, "x" * 4000 + "y" * 400))
    assert isinstance(served, Decision)
    assert served.matched_tokens > 0
    assert isinstance(pool.decide(build_request(CONDITIONAL, "z" * 4000)), Rejection)


def test_a_strategy_without_prefixes_refuses_all_conditional_requests():
    """Without a prediction nothing counts as cached, as upstream without a producer."""
    pool = build_pool("random")
    send(pool)
    assert isinstance(pool.decide(build_request(CONDITIONAL)), Rejection)


@pytest.mark.parametrize(
    ("value", "is_conditional"),
    [
        ("If-Available", True),
        ("return=minimal, if-available", True),
        (" if-available ;a=b", True),
        ("return=minimal", False),
        ("if-available-but-different", False),
        ("if-available=1", False),
        ("", False),
    ],
)
def test_the_header_is_a_list_of_preferences(value, is_conditional):
    """Case and parameters do not matter; other preferences are not read."""
    outcome = build_pool().decide(build_request({"prefer": value}))
    assert isinstance(outcome, Rejection) is is_conditional


def test_an_empty_pool_is_no_failed_condition():
    """A request without an endpoint has its usual status."""
    outcome = PoolFixture({}).decide(build_request(CONDITIONAL))
    assert not isinstance(outcome, Decision)
    rejection = outcome if isinstance(outcome, Rejection) else outcome.rejection
    assert rejection.status == 503
