"""The index of claims against a comparison with every condition."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.pool_match import MatchIndex, PoolMatch
from tests.support import linear_match
from tests.support.seeded import examples

hosts = st.text("ab.", max_size=5)
patterns = st.one_of(hosts, hosts.map(lambda text: f"*.{text}"))
paths = st.text("ab/", max_size=6).map(lambda text: f"/{text}")
models = st.text("ab-", max_size=4)
values = st.sampled_from("123")


def some(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


claimed = st.builds(
    PoolMatch,
    hosts=some(patterns),
    paths=some(paths),
    headers=st.dictionaries(st.sampled_from("xyz"), values, max_size=2),
    models=some(st.one_of(models, models.map(lambda text: f"{text}*"))),
)
request_headers = st.fixed_dictionaries(
    {":authority": hosts, ":path": paths},
    optional={"x": values, "y": values, "z": values},
)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(claimed, max_size=6), request_headers, models)
def test_index_agrees_with_linear_matching(listed, headers, model):
    """The same claims in the same order, for headers and for models."""
    index = MatchIndex(listed)
    routes = index.find_routes(headers)
    fitting = [at for at, claim in enumerate(listed) if linear_match.matches(claim, headers)]
    assert list(index.positions(routes, headers)) == fitting
    named = [
        at
        for at in fitting
        if not listed[at].models or linear_match.matches_model(listed[at], model)
    ]
    assert list(index.positions(routes & index.find_models(model), headers)) == named
    assert index.with_conditions == sum(
        1 << at for at, claim in enumerate(listed) if not claim.is_empty
    )


class Counting(dict):
    """Headers that count how often they are read."""

    reads = 0

    def get(self, *args):
        self.reads += 1
        return super().get(*args)


def test_header_lookups_do_not_grow_with_conditions():
    """A hundred pools of 64 conditions of every kind cost what one pool costs."""
    listed = [
        PoolMatch(
            hosts=tuple(f"*.h{at}.p{pool}" for at in range(64)),
            paths=tuple(f"/p{pool}/{at}" for at in range(64)),
            headers={f"x-{at}": "1" for at in range(63)} | {"x-pool": str(pool)},
            models=tuple(f"m{pool}-{at}*" for at in range(64)),
        )
        for pool in range(100)
    ]
    index = MatchIndex(listed)
    shared = {f"x-{at}": "1" for at in range(63)} | {"x-pool": "99"}
    headers = Counting({":authority": "a.h63.p99", ":path": "/p99/63/v1", **shared})
    routes = index.find_routes(headers) & index.find_models("m99-63")
    assert list(index.positions(routes, headers)) == [99]
    assert headers.reads <= 70


def test_rare_header_conditions_are_compared_first():
    """Pools that differ in one of 64 headers cost one comparison, and the one that fits 64."""
    listed = [
        PoolMatch(headers={f"x-{at}": "1" for at in range(63)} | {"x-pool": str(pool)})
        for pool in range(100)
    ]
    index = MatchIndex(listed)
    headers = Counting({f"x-{at}": "1" for at in range(63)} | {"x-pool": "99"})
    assert list(index.positions(index.find_routes(headers), headers)) == [99]
    assert headers.reads <= 99 + 64


def test_lookups_of_long_hosts_and_paths_are_bounded():
    """A client that sends thousands of dots or slashes costs as many lookups as patterns are deep."""
    index = MatchIndex([PoolMatch(hosts=("*.a.b",), paths=("/v1/x",))])
    headers = {":authority": "." * 60_000 + "a.b", ":path": "/v1/x" + "/" * 60_000}
    assert index.find_routes(headers) == 1
