import msgspec
import pytest

from extproc.config import loader, profile_builder
from extproc.config.epp_plugin_types import plugin_types
from extproc.scheduling import registry

TYPES = plugin_types()
TABLES = {
    "filter": registry.FILTERS,
    "scorer": registry.SCORERS,
    "picker": registry.PICKERS,
    "detector": registry.FILTERS,
}
ROWS = [pytest.param(row, id=name) for name, row in TYPES.items()]


@pytest.mark.parametrize("row", ROWS)
def test_built_types_are_in_the_catalogue(row):
    """A built type has a class of its role, and the parameters it ignores are no fields of it."""
    if not row.kind:
        assert row.status != "built"
        return
    assert row.status == "deprecated" or row.kind == row.name
    fields = msgspec.structs.fields(TABLES[row.role][row.kind])
    unread = {*row.parameters, *row.ignored.defaults}
    names = {field.encode_name for field in fields}
    assert not names & unread
    assert set(row.positive) <= names


@pytest.mark.parametrize("row", ROWS)
def test_unsupported_types_are_explained(row):
    """Types without effect and deprecated types have a note of one sentence."""
    assert bool(row.note) == (row.status != "built")
    assert "\n" not in row.note
    assert not row.note.endswith(".")
    if row.status == "deprecated":
        ours = {**registry.FILTERS, **registry.SCORERS}
        assert row.instead in ours or TYPES[row.instead].status != "deprecated"
        assert row.note.startswith(f"{row.name} is deprecated: ")


@pytest.mark.parametrize("row", ROWS)
def test_ignored_parameters_are_explained(row):
    """The warning has a reason, and no parameter is accepted with and without it."""
    assert bool(row.ignored.note) == bool(row.ignored.defaults)
    assert not set(row.parameters) & set(row.ignored.defaults)


@pytest.mark.parametrize("table", [registry.FILTERS, registry.SCORERS, registry.PICKERS])
def test_every_upstream_kind_can_be_written(table):
    """A plugin that reproduces an upstream file is a type that upstream's files may name."""
    kinds = {cls.kind for cls in table.values() if "Upstream:" in " ".join(cls.__doc__.split())}
    assert kinds == {kind for kind in table if kind in TYPES}
    assert all(TYPES[kind].kind == kind for kind in kinds)


@pytest.mark.parametrize(
    "plugin",
    [
        "type: sheddable-eviction-filter",
        "type: priority-then-time-eviction-order-policy",
        "type: eviction-sheddable-filter",
        "type: eviction-priority-then-time-ordering",
        "type: model-server-protocol-models",
        "type: mm-embeddings-cache-scorer, parameters: {producerName: mm}",
        "type: active-request-scorer, parameters: {idleThreshold: -1}",
        "type: load-aware-scorer, parameters: {threshold: 0}",
        "type: no-hit-lru-scorer, parameters: {lruSize: 0}",
        "type: token-load-scorer, parameters: {queueThresholdTokens: 0}",
        "type: prefix-cache-affinity-filter, parameters: {peakPrefillThroughput: 0}",
        "type: random-picker, parameters: {maxNumOfEndpoints: 0}",
        "type: weighted-random-picker, parameters: {maxNumOfEndpoints: -1}",
    ],
)
def test_plugins_of_upstream_files_are_accepted(plugin):
    """Types and parameters have the names that upstream registers and reads."""
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
    text += f"plugins: [{{{plugin}}}, {{type: queue-scorer}}]\n"
    settings = loader.settings(loader.parse(text, where="file.yaml"))
    profile_builder.build_profile(settings, where="file.yaml")


def test_numbers_that_have_to_be_positive_are_defaults_otherwise():
    """Upstream takes 0 and less for no value; text, and such numbers elsewhere, are errors."""
    row = TYPES["max-score-picker"]
    assert row.convert_parameters({"maxNumOfEndpoints": 0}) == {}
    assert row.convert_parameters({"maxNumOfEndpoints": 2}) == {"maxNumOfEndpoints": 2}
    assert row.convert_parameters({"maxNumOfEndpoints": False}) == {"maxNumOfEndpoints": False}
