from __future__ import annotations

import random

import pytest

from extproc.endpoint import Endpoint, Load, ServedModels
from extproc.pool.snapshot import Alias, ModelIndex, healthiest
from extproc.pool.store import PoolStore


def models(base: str, *adapters: str) -> ServedModels:
    return ServedModels(frozenset({base}), frozenset(adapters))


def serving(*listed: ServedModels | None) -> ModelIndex:
    return ModelIndex([(Endpoint(f"10.0.0.{at}:1"), item) for at, item in enumerate(listed)])


def positions(index: ModelIndex, model: str, adapter: str = "") -> list[int] | None:
    split = index.match(model, adapter)
    return None if split is None else list(split.positions)


def test_without_model_lists_every_endpoint_may_serve():
    """Unknown is unknown: no endpoint is left out while no engine listed anything."""
    assert serving().match("m") is None
    assert serving(None, None).match("m") is None


def test_endpoints_that_list_a_name_or_no_names_match():
    """Known holders and unknown endpoints stay in, in pool order."""
    index = serving(models("a"), None, models("b", "lora"), models("a", "lora"))
    assert positions(index, "a") == [0, 1, 3]
    assert positions(index, "lora") == [1, 2, 3]
    split = index.match("b")
    assert split is not None
    assert [other.address for other in split.others] == ["10.0.0.0:1", "10.0.0.3:1"]


def test_an_unlisted_name_goes_to_unknown_endpoints():
    """If no endpoint lists a name, those with unknown lists are left, or none."""
    assert positions(serving(models("a"), None), "x") == [1]
    assert positions(serving(models("a"), models("b")), "x") == []


def test_a_request_without_a_model_matches_every_endpoint():
    """An engine takes its base model then."""
    assert serving(models("a"), models("b")).match("") is None


def test_a_name_that_all_serve_matches_without_a_copy():
    """None, not a list of all."""
    assert serving(models("a"), models("a", "l")).match("a") is None


def test_a_separate_adapter_requires_both_names():
    """Adapters of two base models may share a name."""
    index = serving(models("a", "sql"), models("b", "sql"), models("a"))
    assert positions(index, "a", "sql") == [0]
    assert positions(index, "b", "sql") == [1]
    assert positions(index, "", "sql") == [0, 1]


def test_an_unlisted_adapter_is_matched_by_its_model():
    """Engines that take a path in `lora_path` do not list it."""
    index = serving(models("a"), models("b"))
    assert positions(index, "a", "/loras/x") == [0]
    assert index.match("", "/loras/x") is None


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("llama_sql", Alias("llama", "sql")),
        ("llama_sql_v2", Alias("llama", "sql_v2")),
        ("qwen_2_math", Alias("qwen_2", "math")),
        ("llama_math", None),
        ("llama_none", None),
        ("none_sql", None),
        ("llama", None),
        ("_sql", None),
        ("llama_", None),
        ("named_so", None),
        ("_" * 100_000, None),
    ],
)
def test_kubeai_names_are_split_where_both_parts_are_listed(name: str, alias: Alias | None):
    """The first underscore between a base model and an adapter of one engine counts."""
    index = serving(
        models("llama", "sql", "sql_v2"), models("qwen_2", "math"), None, models("named_so", "so")
    )
    assert index.parse_kubeai_name(name) == alias
    assert index.parse_kubeai_name(name) == alias


def test_store_forgets_models_when_the_engine_restarts():
    """Lists outlive scrapes and snapshots; a new process or incarnation starts unknown."""
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint("10.0.0.1:1"), Endpoint("10.0.0.2:1")], 0.0)
    first = store.pool.members[0].endpoint
    store.observe_models(first, models("m", "lora"))
    assert store.pool.adapters == {"lora"}
    before = store.pool.serving
    for at in (1.0, 2.0):
        store.observe(store.begin_scrape(first), Load(at=at, started_at=100.0), at)
    store.observe_models(first, models("m", "lora"))
    assert store.pool.serving is before
    assert store.pool.members[0].models == models("m", "lora")
    store.observe(store.begin_scrape(first), Load(at=3.0, started_at=200.0), 3.0)
    assert store.pool.members[0].models is None
    assert store.pool.serving is not before
    store.observe_models(first, models("m"))
    store.set_endpoints([Endpoint("10.0.0.2:1")], 4.0)
    store.set_endpoints([Endpoint("10.0.0.1:1")], 5.0)
    store.observe_models(first, models("m"))
    assert store.pool.members[0].models is None


def test_eligible_members_serve_are_allowed_and_are_up():
    """The split comes first, then the hint, then health, unless that leaves none."""
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(f"10.0.0.{at}:1") for at in range(4)], 0.0)
    for at, member in enumerate(store.pool.members):
        store.observe_models(member.endpoint, models("a" if at < 2 else "b"))

    def eligible(name: str, subset: tuple[str, ...] | None = None) -> list[str]:
        pool = store.pool
        allowed = pool.allowed(subset, pool.serving.match(name))
        return [item.endpoint.address for item in healthiest(allowed)]

    assert eligible("a") == ["10.0.0.0:1", "10.0.0.1:1"]
    assert eligible("a", ("10.0.0.1", "10.0.0.2")) == ["10.0.0.1:1"]
    assert eligible("x") == []
    for at in (0, 0, 1, 1):
        store.scrape_failed(store.begin_scrape(store.pool.members[at].endpoint), "refused", 0.0)
    assert eligible("a") == ["10.0.0.0:1", "10.0.0.1:1"]
    assert eligible("b") == ["10.0.0.2:1", "10.0.0.3:1"]


def test_splits_agree_with_a_linear_search():
    """On random fleets: exactly those that list a name or list nothing known."""
    rng = random.Random(1)
    names = "abcd"
    for _ in range(200):
        listed = [
            rng.choice([None, models(rng.choice(names), *rng.sample(names, rng.randrange(3)))])
            for _ in range(rng.randrange(8))
        ]
        index = serving(*listed)
        for name in "abcdx":
            wanted = [at for at, item in enumerate(listed) if item is None or name in item]
            got = positions(index, name)
            assert got == (None if len(wanted) == len(listed) else wanted)


def test_a_repeated_lookup_is_cached():
    """The second question about a name takes no walk."""
    index = serving(models("a"), models("b"))
    assert index.match("a") is index.match("a")
    assert index.match("x") is index.match("y")
