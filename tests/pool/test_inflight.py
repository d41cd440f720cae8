from __future__ import annotations

import math

import pytest

from extproc.endpoint import Endpoint
from extproc.pool.inflight import InflightLoad


def test_a_reservation_charges_and_releases():
    """An open request counts with its prompt and its adapter, and leaves nothing when it ends."""
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    first = account.open("lora", 100, cached_tokens=0, now=0.0)
    second = account.open("lora", 20, cached_tokens=0, now=0.0)
    assert (account.in_flight, account.prompt_tokens, account.adapters) == (2, 120, {"lora": 2})
    first.close(0.0)
    assert (account.in_flight, account.prompt_tokens, account.adapters) == (1, 20, {"lora": 1})
    second.close(0.0)
    assert (account.in_flight, account.prompt_tokens, account.adapters) == (0, 0, {})
    assert account.opened == 2


def test_a_reservation_closes_once():
    """A second close is a bug of the caller and changes nothing."""
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    other = account.open("m", 1, cached_tokens=0, now=0.0)
    reservation = account.open("m", 1, cached_tokens=0, now=0.0)
    reservation.close(0.0)
    with pytest.raises(RuntimeError, match="closed twice"):
        reservation.close(0.0)
    assert account.in_flight == 1
    other.close(0.0)
    assert account.in_flight == 0


def test_reservations_close_in_any_order():
    """Accounts of different adapters do not mix."""
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    reservations = [
        account.open(name, tokens, cached_tokens=0, now=0.0)
        for tokens, name in enumerate(["a", "b", "", "a"])
    ]
    reservations[2].close(0.0)
    reservations[0].close(0.0)
    assert account.adapters == {"a": 1, "b": 1}
    reservations[3].close(0.0)
    reservations[1].close(0.0)
    assert (account.in_flight, account.prompt_tokens, account.adapters) == (0, 0, {})


def test_finished_requests_are_recorded_until_compared():
    """Text by name, and what ran; what never ran does not count."""
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    sizes = {"a": 400, "b": 40, "": 0}
    reservations = {
        name: account.open(name, 100, cached_tokens=0, now=0.0, prompt_bytes=size)
        for name, size in sizes.items()
    }
    lost = account.open("c", 100, cached_tokens=0, now=0.0, prompt_bytes=4)
    lost.close(0.0, answered=False)
    for reservation in reservations.values():
        reservation.close(1.0)
    assert account.answered == 3
    assert account.texts == {"a": [1, 400], "b": [1, 40]}
    assert account.ran == {"a", "b", ""}


def test_time_without_requests_is_counted():
    """From the last one that ends to the next one that begins, and while none is open."""
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    first = account.open("", 100, cached_tokens=0, now=2.0)
    second = account.open("", 100, cached_tokens=0, now=3.0)
    assert account.idle == (2.0, math.inf, 0)
    first.close(4.0)
    second.close(5.0, answered=False)
    assert account.idle == (2.0, 5.0, 1)
    assert account.idle.until(8.0) == 5.0
    account.open("", 100, cached_tokens=0, now=9.0)
    assert account.idle == (6.0, math.inf, 1)


def test_unread_records_are_bounded():
    """A thousand names and no scrape: 64 are remembered."""
    account = InflightLoad(Endpoint("10.0.0.1:8000"))
    for name in map(str, range(1000)):
        account.open(name, 1, cached_tokens=0, now=0.0, prompt_bytes=4).close(0.0)
    assert (len(account.texts), len(account.ran), account.answered) == (64, 64, 1000)
