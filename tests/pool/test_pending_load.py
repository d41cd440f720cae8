"""Load that queued requests will add to an endpoint."""

from extproc.pool import conversations
from tests.support.pool_fixture import PoolFixture

A = "10.0.0.1:8000"


def test_pending_load_counts_until_it_is_removed():
    """Tokens of the prompt; nothing is in flight."""
    pool_fixture = PoolFixture({A: None})
    account = pool_fixture.store.pool.find(A).account
    pending = pool_fixture.director.pending_load
    pending.reconfigure(counted=True)
    promise = pending.add(A, (1, 2, 3), prompt_tokens=200)
    assert account.active_context_tokens > 0.0
    assert account.in_flight == 0
    conversations.remove_pending(promise)
    assert account.active_context_tokens == 0.0


def test_no_pending_load_without_an_endpoint():
    """No endpoint, no prompt, none of that name, or no profile that reads it."""
    pool_fixture = PoolFixture({A: None})
    pending = pool_fixture.director.pending_load
    pending.reconfigure(counted=True)
    assert pending.add("", (1,), prompt_tokens=64) is None
    assert pending.add(A, (), prompt_tokens=64) is None
    assert pending.add("10.0.0.9:8000", (1,), prompt_tokens=64) is None
    pending.reconfigure(counted=False)
    assert pending.add(A, (1,), prompt_tokens=64) is None
    conversations.remove_pending(None)
