"""The filter chain against docs/spec/prior-systems.md#filter-tree as plain conditions."""

from random import Random

import pytest

from extproc.scheduling.filter_tree import FilterChain
from tests.scheduling import builders


def least_queuing(pods):
    low, high = min(p["waiting"] for p in pods), max(p["waiting"] for p in pods)
    return [p for p in pods if low <= p["waiting"] <= low + (high - low) // len(pods)]


def least_kv(pods):
    low, high = min(p["kv_usage"] for p in pods), max(p["kv_usage"] for p in pods)
    return [p for p in pods if p["kv_usage"] <= low + (high - low) / len(pods)]


def low_cost(pods, target):
    cheap = [p for p in pods if target in p["adapters"] or len(p["adapters"]) < p["adapter_slots"]]
    return cheap or pods


def chain(pods, target, *, sheddable):
    """Remaining pods of those whose values are all known."""
    if sheddable:
        pods = [p for p in pods if p["waiting"] <= 5 and p["kv_usage"] <= 0.8]
        return least_kv(low_cost(least_queuing(pods), target)) if pods else []
    quick = [p for p in pods if p["waiting"] < 50]
    if not quick:
        return least_kv(low_cost(least_queuing(pods), target))
    active = [p for p in quick if target in p["adapters"]]
    if active:
        return least_kv(least_queuing(active))
    roomy = [p for p in quick if len(p["adapters"]) < p["adapter_slots"]]
    return least_kv(least_queuing(roomy or quick))


@pytest.mark.parametrize("longest", [4, 12, 60, 500])
@pytest.mark.parametrize("sheddable", [False, True])
def test_the_chain_is_the_published_tree(longest, sheddable):
    """1000 random fleets each: the same pods are left."""
    rng = Random(longest)
    headers = {"x-llm-d-inference-objective": "sheddable"} if sheddable else {}
    left = set()
    for _ in range(1000):
        slots = rng.choice((0, 1, 2, 4))
        pods = [
            {
                "name": f"pod{i}",
                "waiting": rng.randint(longest // 3, longest),
                "kv_usage": rng.choice((0.1, 0.5, 0.8, rng.random())),
                "adapters": rng.sample(("x", "y", "z", "w"), rng.randint(0, slots)),
                "adapter_slots": slots,
            }
            for i in range(rng.randint(1, 9))
        ]
        target = rng.choice(("base", "x", "y"))
        candidates = [builders.candidate(**pod) for pod in pods]
        passing = builders.names(
            FilterChain().filter(builders.context(model=target, headers=headers), candidates)
        )
        assert passing == [pod["name"] for pod in chain(pods, target, sheddable=sheddable)]
        left.add(len(passing))
    assert len(left) > 1 or (sheddable and longest > 12)
