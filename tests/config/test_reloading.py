"""Tests of live fields and of those that need a restart: every field of the configuration."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import inspect

from extproc.config import pool_sections, reloading
from extproc.config.pool_sections import PoolSection
from extproc.config.settings import Settings
from tests.support.config_text import read

#: Fields of which there is one value, so that they cannot differ.
FIXED = {"apiVersion", "kind"}


def other(kind, value):
    """A value of a type that is not the given one; ranges and patterns are not looked at."""
    match kind:
        case inspect.UnionType():
            rest = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
            return other(rest[0], value) if value is None or len(rest) == 1 else None
        case inspect.BoolType():
            return not value
        case inspect.IntType() | inspect.FloatType():
            return (value or 0) + 1
        case inspect.StrType():
            return f"{value or ''}x"
        case inspect.LiteralType():
            return next((choice for choice in kind.values if choice != value), value)
        case inspect.StructType():
            return sample(kind)
        case inspect.DictType():
            return {"k": other(kind.value_type, None)}
        case inspect.VarTupleType() | inspect.ListType():
            return (other(kind.item_type, None),)
        case _:
            return "anything"


def sample(kind):
    required = {field.name: other(field.type, None) for field in kind.fields if field.required}
    return kind.cls(**required)


def leaves(kind, value, path):
    """Every field below, with a way to change it alone: (path, changed value)."""
    for field in inspect.type_info(kind).fields:
        old = getattr(value, field.name)
        at = (*path, field.encode_name.removeprefix("_"))
        if isinstance(old, msgspec.Struct):
            for below, changed in leaves(type(old), old, at):
                yield below, msgspec.structs.replace(value, **{field.name: changed})
        else:
            new = other(field.type, old)
            yield at, msgspec.structs.replace(value, **{field.name: new})


def every_field():
    """Of `Settings`, and of a pool of several."""
    started = Settings()
    for path, changed in leaves(Settings, started, ()):
        if path[0] not in {*FIXED, "pools"}:
            yield ".".join(path), path[:2], started, changed
    pool = PoolSection(name="a", endpoints=("10.0.0.1:8000",))
    several = Settings(pools=(pool,))
    for path, changed in leaves(PoolSection, pool, ()):
        if path != ("name",):
            changed_path = "pools[a]." + ".".join(path)
            yield changed_path, ("pools", path[0]), several, Settings(pools=(changed,))


FIELDS = list(every_field())


def test_rules_of_scheduling_are_live():
    """All fields that belong to a live strategy are live."""
    rules = {field.name for field in msgspec.structs.fields(pool_sections.SchedulingRules)}
    assert rules <= {*reloading.LIVE["scheduling"]}


def test_live_fields_exist():
    """The table of live fields names fields of the configuration only."""
    for section, live in reloading.LIVE.items():
        assert {*live} <= {field.name for field in msgspec.structs.fields(row_kind(section))}


@pytest.mark.parametrize(
    ("changed_path", "fixture", "started", "wanted"),
    FIELDS,
    ids=[changed_path for changed_path, *_ in FIELDS],
)
def test_every_field_is_live_or_waits_for_a_restart(changed_path, fixture, started, wanted):
    """A live field is taken over whole, any other changes nothing; both are named by their path."""
    section, name = fixture if len(fixture) == 2 else ("", fixture[0])
    encoded = {
        field.encode_name.removeprefix("_"): field.name
        for field in msgspec.structs.fields(row_kind(section))
    }
    is_live = encoded[name] in reloading.LIVE.get(section, ())
    (change,) = reloading.find_changes(started, wanted)
    assert change.path == changed_path or change.path.startswith(f"{changed_path}.")
    assert change.is_live is is_live
    assert reloading.apply_live_fields(started, wanted) == (wanted if is_live else started)
    assert list(reloading.find_restart_fields(started, wanted)) == (
        [] if is_live else [change.path]
    )


def row_kind(section):
    if section == "pools":
        return PoolSection
    return type(getattr(Settings(), section)) if section else Settings


def test_pools_are_compared_by_name():
    """The set of pools and their order change with a restart, their rules at once."""
    old = read(
        "pools:\n- {name: a, endpoints: ['10.0.0.1:1']}\n- {name: b, endpoints: ['10.0.0.2:1']}\n"
    )
    new = read(
        "pools:\n"
        "- {name: b, endpoints: ['10.0.0.3:1'], match: {hosts: [b]}}\n"
        "- {name: c, endpoints: ['10.0.0.2:1']}\n"
    )
    assert [(change.path, change.is_live) for change in reloading.find_changes(old, new)] == [
        ("pools", False),
        ("pools[b].endpoints", False),
        ("pools[b].match.hosts", True),
    ]
    merged = reloading.apply_live_fields(old, new)
    assert [pool.name for pool in merged.pools] == ["a", "b"]
    assert merged.pools[0] == old.pools[0]
    assert merged.pools[1].match.hosts == ("b",)
    assert merged.pools[1].endpoints == ("10.0.0.2:1",)
    alone = read("pool: {endpoints: ['10.0.0.9:1']}")
    assert reloading.apply_live_fields(old, alone) == old


def test_a_pool_that_moves_to_pools_keeps_its_rules_until_the_restart():
    """Rules that move from `pool` and `scheduling` to `pools`, or back, stay as they are in force."""
    rules = "objectives: {gold: 5}, rewrites: [{models: [a], targets: [{model: b}]}]"
    alone = read(
        f"pool: {{endpoints: ['10.0.0.1:1'], {rules}}}\nscheduling: {{strategy: random}}\n"
        "log: {level: info}"
    )
    several = read(
        f"pools: [{{name: main, endpoints: ['10.0.0.1:1'], {rules}, "
        "scheduling: {strategy: random}}]\nlog: {level: debug}"
    )
    for before, after in ((alone, several), (several, alone)):
        merged = reloading.apply_live_fields(before, after)
        assert (merged.pool, merged.pools) == (before.pool, before.pools)
        assert merged.scheduling == before.scheduling
        assert merged.log == after.log
        restart = set(reloading.find_restart_fields(before, after))
        assert {"pools", "pool.objectives", "scheduling.strategy"} <= restart


def test_top_level_scheduling_is_live_where_no_pool_has_its_own():
    """The section means the same with and without `pools`."""
    alone = read("pool: {endpoints: ['10.0.0.1:1']}\nscheduling: {strategy: random}")
    several = read(
        "pools: [{name: main, endpoints: ['10.0.0.1:1']}]\nscheduling: {strategy: lmetric}"
    )
    assert reloading.apply_live_fields(alone, several).scheduling.strategy == "lmetric"
    assert "scheduling.strategy" not in reloading.find_restart_fields(alone, several)


def test_changes_name_the_full_path():
    """A path ends at what differs, values are short, and what may be a password is not shown."""
    old = read(
        "pool: {objectives: {gold: 1}}\npeer_sync: {url: 'redis://:secret@h:1/0'}\n"
        "cluster: {lease: {name: a}}\n"
    )
    new = read(
        "pool: {objectives: {gold: 2, free: -1}}\npeer_sync: {url: 'redis://:other@h:1/0'}\n"
        "cluster: {lease: {name: b}}\nseed: 3\n"
    )
    listed = [
        (change.path, change.before, change.after) for change in reloading.find_changes(old, new)
    ]
    assert listed == [
        ("pool.objectives.gold", "1", "2"),
        ("pool.objectives.free", "none", "-1"),
        ("cluster.lease.name", '"a"', '"b"'),
        ("peer_sync.url", "(not shown)", "(not shown)"),
        ("seed", "null", "3"),
    ]
    assert not list(reloading.find_changes(new, new))
    long = Settings(pool=pool_sections.PoolSource(endpoints=("10.0.0.1:8000",) * 50))
    (change,) = reloading.find_changes(Settings(), long)
    assert len(change.after) == 60
