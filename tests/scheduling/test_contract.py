import math
from random import Random

import msgspec
import pytest

from extproc.scheduling import catalogue, defaults
from extproc.scheduling.plugins import Signal
from tests.scheduling import fleet

TABLES = (catalogue.FILTERS, catalogue.SCORERS, catalogue.PICKERS)
PLUGINS = [
    pytest.param(cls, id=f"{role}-{kind}")
    for role, table in zip(("filter", "scorer", "picker"), TABLES, strict=True)
    for kind, cls in table.items()
]
FILTERS = [pytest.param(cls, id=kind) for kind, cls in catalogue.FILTERS.items()]
SCORERS = [pytest.param(cls, id=kind) for kind, cls in catalogue.SCORERS.items()]
PICKERS = [pytest.param(cls, id=kind) for kind, cls in catalogue.PICKERS.items()]
SIZES = (1, 2, 1000)


def crowd(size, *, known=True, seed=7):
    """Candidates with a bit of everything, every fifth never scraped; or none of them scraped."""
    rng = Random(seed)
    made = []
    for i in range(size):
        facts = {"in_flight": rng.randrange(20), "matched_tokens": rng.choice((0, 0, 64, 900))}
        if known and i % 5:
            facts |= {
                "waiting": rng.randrange(60),
                "running": rng.randrange(100),
                "kv_usage": rng.random(),
                "adapters": rng.choice(([], ["lora"], ["x", "y"], None)),
                "waiting_adapters": rng.choice(([], ["lora"], None)),
                "adapter_slots": rng.choice((2, 4, None)),
            }
        made.append(fleet.candidate(f"10.0.{i // 250}.{i % 250}", **facts))
    return made


def asked(seed=1):
    return fleet.turn(seed, model="lora", prompt_tokens=1000)


@pytest.mark.parametrize("cls", PLUGINS)
def test_plugin_declares_itself(cls):
    """A plugin has a kebab-case kind, declares its signals, and says what it does."""
    plugin = cls()
    assert plugin.kind == plugin.kind.lower().replace("_", "-")
    assert all(isinstance(signal, Signal) for signal in plugin.needs)
    assert len(cls.__doc__) > 40
    for field in cls.__struct_fields__:
        assert f"{field}: " in cls.__doc__


@pytest.mark.parametrize("table", TABLES)
def test_kinds_are_listed_under_their_own_names(table):
    """The name in the catalogue is the kind of the class."""
    assert [cls.kind for cls in table.values()] == list(table)


@pytest.mark.parametrize("cls", PLUGINS)
def test_plugin_refuses_an_unknown_parameter(cls):
    """A misspelt parameter is an error, not a default."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"no_such_parameter": 1}, cls)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [0, *SIZES])
@pytest.mark.parametrize("cls", SCORERS)
def test_scorer_contract(cls, size, known):
    """One finite score in 0..1 for each, the same again, whatever the order, nothing changed."""
    candidates = crowd(size, known=known)
    before = msgspec.json.encode(candidates)
    scores = cls().score(asked(), candidates)
    assert isinstance(scores, list)
    assert len(scores) == size
    assert all(math.isfinite(score) and 0 <= score <= 1 for score in scores)
    assert cls().score(asked(2), candidates) == scores
    backwards = cls().score(asked(), candidates[::-1])
    assert backwards[::-1] == pytest.approx(scores, abs=1e-12)
    assert msgspec.json.encode(candidates) == before


@pytest.mark.parametrize("cls", SCORERS)
def test_unknown_is_neither_best_nor_worst(cls):
    """A candidate never scraped scores within the known ones; without signals all score alike."""
    candidates = crowd(40)
    scores = cls().score(asked(), candidates)
    unscraped = [s for s, c in zip(scores, candidates, strict=True) if c.load.waiting is None]
    if cls().needs & {Signal.WAITING, Signal.KV_USAGE, Signal.ADAPTERS}:
        assert all(min(scores) < score < max(scores) for score in unscraped)
        assert len(set(cls().score(asked(), crowd(9, known=False)))) == 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [0, *SIZES])
@pytest.mark.parametrize("cls", FILTERS)
def test_filter_contract(cls, size, known):
    """A part of the candidates in their order, the same again, whatever the order."""
    candidates = crowd(size, known=known)
    before = msgspec.json.encode(candidates)
    kept = cls().keep(asked(), candidates)
    assert [c for c in candidates if any(c is k for k in kept)] == list(kept)
    assert list(cls().keep(asked(2), candidates)) == list(kept)
    assert list(cls().keep(asked(), candidates[::-1]))[::-1] == list(kept)
    if not known and Signal.PREFIX not in cls().needs:
        assert list(kept) == candidates
    assert msgspec.json.encode(candidates) == before


@pytest.mark.parametrize("count", [1, 3, 2000])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cls", PICKERS)
def test_picker_contract(cls, size, count):
    """Different positions, as many as asked for, the same for the same seed, nothing changed."""
    candidates = crowd(size)
    totals = [float(i % 17) for i in range(size)]
    before = msgspec.json.encode(candidates)
    picked = cls().pick(asked(), candidates, totals, count=count)
    assert len(picked) == len(set(picked)) == min(count, size)
    assert set(picked) <= set(range(size))
    assert cls().pick(asked(), candidates, totals, count=count) == picked
    assert msgspec.json.encode(candidates) == before


@pytest.mark.parametrize("cls", PICKERS)
def test_picker_does_not_care_about_the_order(cls):
    """Turning the candidates around does not move the picks between endpoints."""
    candidates = crowd(4)
    totals = [1.0, 2.0, 3.0, 4.0]

    def shares(step):
        turn, plugin = asked(), cls()
        counts = dict.fromkeys(fleet.names(candidates), 0)
        for _ in range(3000):
            (i,) = plugin.pick(turn, candidates[::step], totals[::step], count=1)
            counts[candidates[::step][i].endpoint.name] += 1 / 3000
        return counts

    assert shares(-1) == pytest.approx(shares(1), abs=0.05)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", list(defaults.profiles()))
def test_named_profiles_decide(name, size):
    """Every named profile picks without degrading, known or not, and repeats itself by seed."""
    for known in (True, False):
        candidates = crowd(size, known=known)
        first = defaults.profiles()[name].run(asked(), candidates)
        again = defaults.profiles()[name].run(asked(), candidates)
        assert first == again
        assert first.degraded == ""
        assert first.endpoints[0] in [c.endpoint for c in candidates]
