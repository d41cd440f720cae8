from __future__ import annotations

import pytest

from extproc.errors import ConfigError
from extproc.routing import pool_match
from tests.server.test_pool_registry import ANY_CLAIM, TWO, A, B, C, ask, discovered, read, sites


async def test_annotations_match_nothing_without_a_rule(caplog):
    """A tenant's pool called a-... takes no request that another pool serves, and is logged once."""
    subject = sites("cluster: {discover_pools: cluster}")
    greedy = {"extproc/models": "*"}
    subject.on_pools_changed({"b/prod": discovered(B, created="2026-01-01T00:00:00Z")}, ())
    evil = discovered(A, annotations=greedy, created="2026-02-01T00:00:00Z")
    subject.on_pools_changed({"a-evil/p": evil}, ())
    subject.on_pools_changed({"a-evil/p": evil}, ())
    assert ask(subject).pool == "b/prod"
    refused = [line for line in caplog.messages if "matches nothing" in line]
    assert refused == [
        "pool a-evil/p matches nothing: model * has no rule in cluster.match_rules",
    ]
    states = {name: view.match_state for name, view in subject.views().items()}
    assert states == {"b/prod": "none", "a-evil/p": "rejected"}


async def test_the_older_pool_takes_overlapping_matches(caplog):
    """Pools are ordered by creation time, after the pools of the configuration."""
    text = ANY_CLAIM + (f"pools: [{{name: own, endpoints: ['{C}'], match: {{hosts: [own]}}}}]\n")
    subject = sites(text)
    claim = {"extproc/hosts": "x,own"}
    subject.on_pools_changed(
        {"a/new": discovered(A, annotations=claim, created="2026-02-01T00:00:00Z")}, ()
    )
    assert ask(subject).pool == "a/new"
    subject.on_pools_changed(
        {"z/old": discovered(B, annotations=claim, created="2026-01-01T00:00:00Z")}, ()
    )
    assert ask(subject).pool == "z/old"
    assert ask(subject, host="own").pool == "own"
    states = {name: view.match_state for name, view in subject.views().items()}
    assert states == {"own": "in_force", "a/new": "overlapped", "z/old": "overlapped"}
    assert sum("matches requests of pool own" in line for line in caplog.messages) == 2
    # Made anew, it is the younger one.
    subject.on_pools_changed(
        {"z/old": discovered(B, annotations=claim, created="2026-03-01T00:00:00Z")}, ()
    )
    assert ask(subject).pool == "a/new"


async def test_matches_are_compared_in_bounded_work(monkeypatch):
    """Many pools with many conditions hold the event loop for milliseconds, and all are served."""
    num_calls = 0
    overlap = pool_match.overlaps

    def counted(first, second):
        nonlocal num_calls
        num_calls += pool_match.num_comparisons(first, second)
        return overlap(first, second)

    monkeypatch.setattr(pool_match, "overlaps", counted)
    brought = {}
    for number in range(30):
        hosts = [f"h{at}.p{number}" for at in range(64)]
        # The third claims a host of the first, and the last one of the second.
        hosts[0] = {2: "h1.p0", 29: "h1.p1"}.get(number, hosts[0])
        brought[f"n/p{number:02}"] = discovered(A, annotations={"extproc/hosts": ",".join(hosts)})
    subject = sites(ANY_CLAIM)
    subject.on_pools_changed(brought, ())
    assert 0 < num_calls <= 20_000
    states = {name: view.match_state for name, view in subject.views().items()}
    assert states.pop("n/p02") == "overlapped"
    assert set(states.values()) == {"in_force"}
    assert ask(subject, host="h1.p1").pool == "n/p01"
    assert ask(subject, host="h1.p29").pool == "n/p29"


async def test_match_rules_are_reloaded():
    """A new configuration is in force for the next request; which pools there are stays."""
    subject = sites(TWO)
    await subject.sync()
    changed = TWO.replace("hosts: [a]", "hosts: [c]").replace(
        "strategy: random", "strategy: lmetric"
    )
    subject.prepare_reload(read(changed))()
    assert ask(subject, host="c").pool == "a"
    assert ask(subject, host="a").pool == "b"
    assert subject.profile == "adaptive,lmetric"
    with pytest.raises(ConfigError):
        subject.prepare_reload(read(TWO.replace("strategy: random", "strategy: nonsense")))
    assert ask(subject, host="c").pool == "a"
