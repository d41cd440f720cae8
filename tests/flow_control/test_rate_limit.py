from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Rejection
from extproc.flow_control import rate_limit
from extproc.flow_control.rate_limit import Charge, RateLimit, TenantRateLimiter
from tests.support.reachable import count_reachable


def passes(allowance, tenant, tokens, now):
    """True if a request is admitted, and charged."""
    return isinstance(allowance.take(tenant, tokens, now), Charge)


def test_no_tenant_is_limited_by_default():
    """No limit, no counting."""
    free = TenantRateLimiter()
    assert not free.is_limiting
    assert all(passes(free, "t", 1e9, 0.0) for _ in range(100))
    assert len(free) == 0


def test_requests_per_second():
    """A burst, then the rate; Retry-After is when the next one is let through."""
    limiter = TenantRateLimiter(RateLimit(requests_per_s=2.0, burst_s=2.0))
    assert all(passes(limiter, "t", 0, 0.0) for _ in range(4))
    refused = limiter.take("t", 0, 0.0)
    assert (refused.status, refused.retry_after_s) == (429, 1)
    assert "2 requests per second" in refused.message
    assert passes(limiter, "other", 0, 0.0)
    assert passes(limiter, "t", 0, 0.5)
    assert not passes(limiter, "t", 0, 0.5)


def test_tokens_are_reconciled_with_the_usage():
    """Unused tokens are refunded, and further ones are charged."""
    limiter = TenantRateLimiter(by_tenant={"t": RateLimit(tokens_per_s=10.0, burst_s=10.0)})
    charge = limiter.take("t", 90, 0.0)
    assert limiter.take("t", 50, 0.0).retry_after_s == 4
    charge.reconcile(50)
    charge = limiter.take("t", 50, 0.0)
    charge.reconcile(150)
    assert limiter.take("t", 10, 0.0).retry_after_s == 11
    free = limiter.take("free", 1e6, 0.0)
    free.reconcile(5)
    free.refund()
    assert len(limiter) == 1


def test_a_request_above_the_bucket_size_passes_when_it_is_full():
    """It takes more than there is, and what follows waits."""
    limiter = TenantRateLimiter(RateLimit(tokens_per_s=10.0, burst_s=1.0))
    assert passes(limiter, "t", 100, 0.0)
    assert limiter.take("t", 1, 0.0).retry_after_s == 10
    assert passes(limiter, "t", 1, 9.2)


def test_a_refused_request_takes_nothing():
    """Neither requests nor tokens."""
    limiter = TenantRateLimiter(RateLimit(requests_per_s=1.0, tokens_per_s=1.0, burst_s=10.0))
    assert passes(limiter, "t", 8, 0.0)
    assert not passes(limiter, "t", 8, 0.0)
    assert passes(limiter, "t", 2, 0.0)


def test_a_rate_of_zero_rejects_all():
    """The first request, too, of requests and of tokens."""
    for limit in (RateLimit(requests_per_s=0.0), RateLimit(tokens_per_s=0.0)):
        limiter = TenantRateLimiter(limit)
        assert limiter.take("t", 1, 0.0).retry_after_s == 3600
        assert limiter.take("t", 1, 1e6).retry_after_s == 3600


def test_retry_after_is_when_both_limits_let_a_request_through():
    """The limit that takes longest is named, and at that time the request passes."""
    limiter = TenantRateLimiter(RateLimit(requests_per_s=1.0, tokens_per_s=10.0, burst_s=1.0))
    assert passes(limiter, "t", 600, 0.0)
    refused = limiter.take("t", 5, 0.0)
    assert refused.retry_after_s == 60
    assert "10 tokens per second" in refused.message
    assert passes(limiter, "t", 5, 60.0)
    refused = limiter.take("t", 1, 60.0)
    assert refused.retry_after_s == 1
    assert "1 requests per second" in refused.message


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3)), max_size=20), st.floats(0, 100))
def test_retry_after_is_exact(steps, tokens):
    """With both limits a refused request passes then, and not a second before."""
    limit = RateLimit(requests_per_s=0.5, tokens_per_s=7.0, burst_s=4.0)
    for early_s in (0.0, 1.001):
        limiter, now = TenantRateLimiter(limit), 0.0
        for taken, passed in steps:
            now += passed
            limiter.take("t", taken, now)
        refused = limiter.take("t", tokens, now)
        if isinstance(refused, Rejection):
            later = now + max(0.0, refused.retry_after_s + 1e-6 - early_s)
            assert passes(limiter, "t", tokens, later) is (not early_s)


def test_a_refund_is_idempotent():
    """A request and its tokens come back, and no more than the bucket holds."""
    limiter = TenantRateLimiter(RateLimit(requests_per_s=1.0, tokens_per_s=1.0, burst_s=10.0))
    charge = limiter.take("t", 10, 0.0)
    assert not passes(limiter, "t", 1, 0.0)
    charge.refund()
    charge.refund()
    charge.reconcile(1000)
    assert passes(limiter, "t", 10, 0.0)
    assert not passes(limiter, "t", 1, 0.0)
    late = limiter.take("t", 10, 100.0)
    assert isinstance(late, Charge)
    limiter.take("t", 0, 200.0)
    late.refund()
    assert [passes(limiter, "t", 0, 200.0) for _ in range(12)] == [True] * 10 + [False] * 2


def test_a_refund_returns_the_reconciled_tokens():
    """Whatever a request was charged with at first."""
    limiter = TenantRateLimiter(RateLimit(tokens_per_s=1.0, burst_s=100.0))
    charge = limiter.take("t", 80, 0.0)
    charge.reconcile(50)
    charge.reconcile(30)
    assert charge.tokens == 30
    charge.refund()
    assert passes(limiter, "t", 100, 0.0)
    assert not passes(limiter, "t", 1, 0.0)


def test_a_bucket_never_fills_twice_for_one_interval():
    """A clock that was read in another order fills a bucket once."""
    limiter = TenantRateLimiter(RateLimit(tokens_per_s=1.0, burst_s=100.0))
    assert passes(limiter, "t", 100, 0.0)
    for now in (50.0, 10.0, 50.0, 20.0, 50.0):
        assert not passes(limiter, "t", 60, now)


def test_no_number_of_tenants_refills_a_bucket():
    """A tenant that took all is remembered; names beyond those remembered share one account."""
    limiter = TenantRateLimiter(RateLimit(requests_per_s=0.001, burst_s=0.0))
    assert passes(limiter, "busy", 0, 0.0)
    let_through = sum(passes(limiter, str(number), 0, 0.0) for number in range(20_000))
    assert let_through == rate_limit.MAX_TENANTS
    assert not passes(limiter, "busy", 0, 0.0)
    assert not passes(limiter, "0", 0, 0.0)
    assert len(limiter) == rate_limit.MAX_TENANTS + 1
    before = count_reachable(limiter)
    for number in range(20_000, 21_000):
        assert not passes(limiter, str(number), 0, 0.0)
    assert count_reachable(limiter) <= before


def test_a_full_bucket_is_forgotten_for_another_tenant():
    """That changes nothing for it, and the other one has an account of its own."""
    limiter = TenantRateLimiter(
        RateLimit(requests_per_s=1.0, burst_s=10.0),
        {"vip": RateLimit(requests_per_s=1.0, burst_s=1.0)},
    )
    assert passes(limiter, "vip", 0, 0.0)
    for number in range(rate_limit.MAX_TENANTS):
        taken = 10 if number == 0 else 1
        assert all(passes(limiter, str(number), 0, 0.0) for _ in range(taken))
    assert all(
        passes(limiter, f"later {number}", 0, 5.0) for number in range(200) for _ in range(10)
    )
    assert not passes(limiter, "later 7", 0, 5.0)
    assert [passes(limiter, "0", 0, 5.0) for _ in range(6)] == [True] * 5 + [False]
    assert not passes(limiter, "vip", 0, 0.5)
    assert len(limiter) == rate_limit.MAX_TENANTS + 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "settle", "refund"]),
            st.floats(0, 30),
            st.integers(0, 10),
            st.floats(0, 3),
        ),
        max_size=50,
    )
)
def test_a_tenant_never_exceeds_its_limit(steps):
    """Admitted requests without refunds are at most the burst plus the rate times the time since."""
    rate, burst_s, now = 10.0, 5.0, 0.0
    limiter = TenantRateLimiter(RateLimit(tokens_per_s=rate, burst_s=burst_s))
    charges, peak = [], 0.0
    for step, tokens, which, passed in steps:
        now += passed
        if step == "take":
            charge = limiter.take("t", tokens, now)
            if not isinstance(charge, Rejection):
                charges.append(charge)
                peak = max(peak, sum(charged.tokens for charged in charges) - rate * now)
        elif charges:
            charge = charges[which % len(charges)]
            if step == "refund":
                charge.refund()
                assert charge.tokens == 0.0
            else:
                charge.reconcile(min(tokens, charge.tokens))
    assert peak <= rate * burst_s + 1e-6


def test_tenants_whose_limit_is_equal_keep_their_buckets():
    """Other limits refill the buckets of those tenants only that they apply to."""
    slow, fast = (RateLimit(requests_per_s=rate, burst_s=1.0) for rate in (0.1, 0.2))
    limiter = TenantRateLimiter(slow, {"a": slow, "b": slow})
    tenants = ("a", "b", "c")
    assert all(passes(limiter, tenant, 0, 0.0) for tenant in tenants)
    for default, by_tenant, refilled in (
        (slow, {"a": slow, "b": slow}, set()),
        (slow, {"a": slow, "b": fast}, {"b"}),
        (fast, {"a": slow, "b": fast}, {"c"}),
        (fast, {"b": fast}, {"a"}),
    ):
        limiter.reconfigure(default, by_tenant)
        assert {tenant for tenant in tenants if passes(limiter, tenant, 0, 0.0)} == refilled


def test_a_limit_that_goes_forgets_what_was_taken():
    """Without a limit requests pass, and a limit that comes again starts anew."""
    limit = RateLimit(requests_per_s=0.1)
    limiter = TenantRateLimiter(limit)
    assert passes(limiter, "a", 0, 0.0)
    limiter.reconfigure(RateLimit(), {})
    assert passes(limiter, "a", 0, 0.0)
    assert not limiter.is_limiting
    limiter.reconfigure(limit, {})
    assert passes(limiter, "a", 0, 0.0)
    assert not passes(limiter, "a", 0, 0.0)
