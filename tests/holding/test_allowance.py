from __future__ import annotations

from extproc.holding.allowance import Allowance, Limit


def test_nobody_is_limited_by_default():
    """No limit, no counting."""
    free = Allowance()
    assert not free.limits
    assert all(free.take("t", 1e9, 0.0) is None for _ in range(100))


def test_requests_per_second():
    """A burst, then the rate; Retry-After is when the next one is let through."""
    one = Allowance(Limit(requests_per_s=2.0, burst_s=2.0))
    assert [one.take("t", 0, 0.0) for _ in range(4)] == [None] * 4
    refused = one.take("t", 0, 0.0)
    assert (refused.status, refused.retry_after_s) == (429, 1)
    assert "2 requests per second" in refused.message
    assert one.take("other", 0, 0.0) is None
    assert one.take("t", 0, 0.5) is None
    assert one.take("t", 0, 0.5) is not None


def test_tokens_per_second_and_what_was_really_used():
    """What an answer did not take is given back, what it took more is owed."""
    one = Allowance(by_tenant={"t": Limit(tokens_per_s=10.0, burst_s=10.0)})
    assert one.take("t", 90, 0.0) is None
    assert one.take("t", 50, 0.0).retry_after_s == 4
    one.settle("t", -40)
    assert one.take("t", 50, 0.0) is None
    one.settle("t", 100)
    assert one.take("t", 10, 0.0).retry_after_s == 11
    assert one.take("free", 1e6, 0.0) is None
    one.settle("free", 5)


def test_a_request_larger_than_the_bucket_goes_when_it_is_full():
    """It takes more than there is, and what follows waits."""
    one = Allowance(Limit(tokens_per_s=10.0, burst_s=1.0))
    assert one.take("t", 100, 0.0) is None
    assert one.take("t", 1, 0.0).retry_after_s == 10
    assert one.take("t", 1, 9.2) is None


def test_a_refused_request_takes_nothing():
    """Neither requests nor tokens."""
    one = Allowance(Limit(requests_per_s=1.0, tokens_per_s=1.0, burst_s=10.0))
    assert one.take("t", 8, 0.0) is None
    assert one.take("t", 8, 0.0) is not None
    assert one.take("t", 2, 0.0) is None


def test_a_rate_of_nothing_lets_nobody_through():
    """Zero is a limit like any other."""
    one = Allowance(Limit(requests_per_s=0.0))
    assert one.take("t", 1, 0.0) is None
    assert one.take("t", 1, 1e6).retry_after_s == 3600


def test_memory_is_bounded():
    """Clients may call themselves what they like: who asked longest ago is forgotten."""
    one = Allowance(Limit(requests_per_s=0.001, burst_s=0.0))
    assert one.take("busy", 0, 0.0) is None
    for number in range(20_000):
        one.take(str(number), 0, 0.0)
        if number % 1000 == 0:
            assert one.take("busy", 0, 0.0) is not None
    assert len(one._requests) <= 16_384
    assert one.take("0", 0, 0.0) is None
