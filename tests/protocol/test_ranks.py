"""Data-parallel ranks on the way to the data plane: destination, header, fallbacks, answers."""

from __future__ import annotations

import pytest

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.protocol import headers
from extproc.request import HttpRequest
from extproc.routing.director import Director
from extproc.scheduling.load_scorers import InFlight
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.profile import SchedulerProfile
from tests.support import ext_proc_script
from tests.support.pool_fixture import PoolFixture

ENGINE, SECOND, SINGLE = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
RANK = headers.DATA_PARALLEL_RANK

#: The endpoint with the fewest requests of ours.
LEAST = SchedulerProfile("least", (), ((InFlight(), 1.0),), MaxScorePicker())


def ranked(counts: dict[str, int], **more: object) -> PoolFixture:
    """A pool of engines with so many ranks each."""
    pool_fixture = PoolFixture(dict.fromkeys(counts), profile=LEAST, **more)
    for address, count in counts.items():
        member = pool_fixture.store.pool.find(address)
        if count > 1 and member is not None:
            pool_fixture.store.set_ranks(member.endpoint, tuple(range(4, 4 + count)), 100.0)
    return pool_fixture


def decide(pool_fixture: PoolFixture) -> Decision:
    outcome = pool_fixture.decide(
        HttpRequest(
            {":method": "POST", ":path": "/v1/chat/completions"},
            b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}',
        )
    )
    assert isinstance(outcome, Decision)
    return outcome


def play(pool_fixture: PoolFixture, destination: str, *pairs: tuple[str, str], **more) -> None:
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({**ext_proc_script.PLAIN, **dict(pairs)}, ends=True),
            ext_proc_script.route(destination, **more),
        ],
        pool_fixture.decide,
    )


def occupy(pool_fixture: PoolFixture, *addresses: str) -> None:
    for address in addresses:
        member = pool_fixture.store.pool.find(address)
        assert member is not None
        member.account.open("m", 10, cached_tokens=0, now=100.0)


def test_the_choice_of_a_rank_goes_out_as_its_position():
    """The destination is that of the engine, and the header counts the ranks behind its port."""
    pool_fixture = ranked({ENGINE: 3})
    occupy(pool_fixture, f"{ENGINE}@0", f"{ENGINE}@2")
    play(pool_fixture, ENGINE, sets=((RANK, "1"),))


def test_a_client_cannot_choose_the_rank():
    """Its header is overwritten, and removed where an engine has no ranks."""
    pool_fixture = ranked({ENGINE: 2})
    occupy(pool_fixture, f"{ENGINE}@0")
    play(pool_fixture, ENGINE, (RANK, "0"), sets=((RANK, "1"),))
    play(ranked({ENGINE: 1}), ENGINE, (RANK, "1"), removes=(RANK,))


def test_an_engine_with_one_rank_gets_no_header():
    """VLLM behind an external balancer rejects a rank that is not its own."""
    play(ranked({SINGLE: 1}), SINGLE)


@pytest.mark.parametrize("_", range(5))
def test_fallbacks_have_the_rank_that_is_sent_along(_: int):
    """Engines without that rank are left out, and so are further ranks of the same engine."""
    counts = {ENGINE: 2, SECOND: 4, "10.0.0.4:8000": 2, SINGLE: 1}
    pool_fixture = ranked(counts, fallbacks=8)
    occupy(pool_fixture, SINGLE, f"{ENGINE}@0", "10.0.0.4:8000@0", "10.0.0.4:8000@1")
    occupy(pool_fixture, f"{ENGINE}@1", f"{ENGINE}@1")
    occupy(pool_fixture, *(f"{SECOND}@{rank}" for rank in (0, 1, 2)))
    first, *others = decide(pool_fixture).endpoints
    assert first.address == f"{SECOND}@3"
    assert others == []
    occupy(pool_fixture, f"{SECOND}@3", f"{SECOND}@3", SINGLE)
    chosen = decide(pool_fixture).endpoints
    rank = chosen[0].rank
    assert rank is not None
    assert {endpoint.host_port for endpoint in chosen} == {ENGINE, SECOND, "10.0.0.4:8000"}
    assert {endpoint.rank.index for endpoint in chosen if endpoint.rank} == {rank.index}


def test_an_engine_without_ranks_falls_back_to_engines_once():
    """Of an engine with ranks one entry stands, and it chooses the rank by itself."""
    pool_fixture = ranked({SINGLE: 1, ENGINE: 3}, fallbacks=3)
    occupy(pool_fixture, *(f"{ENGINE}@{rank}" for rank in range(3)))
    chosen = decide(pool_fixture).endpoints
    assert [endpoint.host_port for endpoint in chosen] == [SINGLE, ENGINE]


def serve(director: Director, pool_fixture: PoolFixture, served: str) -> Endpoint:
    reservation = director.reserve(decide(pool_fixture), pool_fixture.now)
    director.on_response_headers(reservation, "200", pool_fixture.now, served=served)
    return reservation.endpoint


def test_the_rank_is_charged_that_answered():
    """The data plane names an engine: it is the chosen rank, or the same one of the fallback."""
    pool_fixture = ranked({ENGINE: 2, SECOND: 2}, fallbacks=1)
    occupy(pool_fixture, f"{ENGINE}@0", f"{SECOND}@0", f"{SECOND}@1")
    assert serve(pool_fixture.director, pool_fixture, ENGINE).address == f"{ENGINE}@1"
    occupy(pool_fixture, f"{ENGINE}@0", f"{SECOND}@0")
    moved = serve(pool_fixture.director, pool_fixture, SECOND)
    assert moved.address == f"{SECOND}@1"
    assert {m.endpoint.address: m.account.in_flight for m in pool_fixture.store.pool.members} == {
        f"{ENGINE}@0": 2,
        f"{ENGINE}@1": 1,
        f"{SECOND}@0": 2,
        f"{SECOND}@1": 2,
    }
