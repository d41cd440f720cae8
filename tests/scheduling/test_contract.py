"""The contract of `extproc.testing.contract` over everything in the catalogue."""

import msgspec
import pytest

from extproc.scheduling import registry
from extproc.scheduling.filter_tree import FilterTreeNode
from extproc.scheduling.load_bounds import KvRange, TopK
from extproc.testing import builders, contract, probes
from tests.docs import reference

TABLES = {
    "filter": (registry.FILTERS, contract.check_filter),
    "scorer": (registry.SCORERS, contract.check_scorer),
    "cost": (registry.COSTS, contract.check_cost),
    "picker": (registry.PICKERS, contract.check_picker),
}
#: Parameters of kinds that cannot be made without any, or that take seconds with their defaults.
PARAMETERS = {
    "by-label": {"label": "zone", "validValues": ["a"], "allowsNoLabel": True},
    "endpoint-attribute-filter": {
        "attribute": "WaitingQueueSize",
        "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 10}},
    },
    "endpoint-attribute-scorer": {
        "attributeKey": "WaitingQueueSize",
        "algorithm": {"type": "linear_lower_is_better"},
    },
    "header-label-affinity-scorer": {"headerName": "x-session", "labelKey": "zone"},
    "prefix-hash": {"replication": 32},
    "tree": {"root": FilterTreeNode(filter=TopK(), on_success=FilterTreeNode(filter=KvRange()))},
    "utilization-filter": {"conditions": [{"metric": "waiting-queue", "maxValue": 10}]},
}
PLUGINS = [
    pytest.param(cls, check, id=f"{role}-{kind}")
    for role, (table, check) in TABLES.items()
    for kind, cls in table.items()
]


@pytest.mark.parametrize(("cls", "check"), PLUGINS)
def test_plugin_passes_the_contract(cls, check):
    """Range, length, repetition, order, no mutation, unknown values, memory in chosen only."""
    params = PARAMETERS.get(cls.kind)
    check(cls if params is None else lambda: msgspec.convert(params, cls))


@pytest.mark.parametrize(("cls", "check"), PLUGINS)
def test_plugin_declares_itself(cls, check):
    """A plugin in this tree says what it does, and explains every parameter."""
    assert len(cls.__doc__) > 40
    for field in cls.__struct_fields__:
        assert field in reference.attributes(cls)


@pytest.mark.parametrize("role", TABLES)
def test_kinds_are_listed_under_their_own_names(role):
    """The name in the registry is the kind of the class, or an alias of it."""
    table, _ = TABLES[role]
    assert [cls.kind for cls in table.values()] == [
        registry.ALIASES.get(name, name) for name in table
    ]


def test_every_alias_is_listed():
    """An alias leads to a class that is also listed under its own kind."""
    tables = [table for table, _ in TABLES.values()]
    for alias, kind in registry.ALIASES.items():
        assert [alias in table for table in tables] == [kind in table for table in tables]
        assert any(alias in table for table in tables)


@pytest.mark.parametrize(("cls", "check"), PLUGINS)
def test_plugin_refuses_an_unknown_parameter(cls, check):
    """A misspelt parameter is an error, not a default."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"no_such_parameter": 1}, cls)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", contract.SIZES)
@pytest.mark.parametrize("name", list(registry.profiles()))
def test_named_profiles_decide(name, size, known):
    """Every named profile picks without degrading, known or not, and repeats itself by seed."""
    candidates = builders.loaded_candidates(size, scraped=known)
    profile = registry.profiles()[name]
    first = profile.run(probes.probe_context(), candidates)
    assert profile.run(probes.probe_context(), candidates) == first
    assert registry.profiles()[name].run(probes.probe_context(), candidates) == first
    assert first.degraded == ""
    assert first.endpoints[0] in [c.endpoint for c in candidates]
