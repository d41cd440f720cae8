import msgspec
import pytest

from extproc.config import loader, profile_builder
from extproc.config.epp_plugin_types import plugin_types
from extproc.errors import ConfigError
from extproc.scheduling import registry
from extproc.testing import builders

TYPES = plugin_types()
TABLES = {
    "filter": registry.FILTERS,
    "scorer": registry.SCORERS,
    "picker": registry.PICKERS,
    "detector": registry.FILTERS,
    "decider": registry.DECIDERS,
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
    assert {*row.default_unless_positive, *row.default_unless_share} <= names


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
    ],
)
def test_plugins_of_upstream_files_are_accepted(plugin):
    """Types and parameters have the names that upstream registers and reads."""
    build(f"{{{plugin}}}", "{type: queue-scorer}")


def build(*plugins):
    """The profile of an upstream file with these plugins."""
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
    text += f"plugins: [{', '.join(plugins)}]\n"
    settings = loader.settings(loader.parse(text, where="file.yaml"))
    return profile_builder.build_profile(settings, where="file.yaml")


POSITIVE = [(row.name, name) for row in TYPES.values() for name in row.default_unless_positive]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(("kind", "parameter"), POSITIVE)
def test_parameters_that_have_to_be_positive_are_defaults_otherwise(kind, parameter, value):
    """As upstream, 0 and less stand for no value."""
    plugins = f"{{type: {kind}}}", f"{{type: {kind}, parameters: {{{parameter}: {value}}}}}"
    plain, written = (build(plugin) for plugin in plugins)
    assert plain == written


@pytest.mark.parametrize("value", [-0.5, 1.5, 80])
def test_a_busy_score_beyond_its_range_is_the_default(value):
    """As upstream, which ignores it; what is within the range, 0 included, counts."""
    plain, ignored, zero = (
        build(f"{{type: active-request-scorer{parameters}}}")
        for parameters in (
            "",
            f", parameters: {{maxBusyScore: {value}}}",
            ", parameters: {maxBusyScore: 0}",
        )
    )
    assert plain == ignored
    assert plain != zero


def test_zero_is_no_default_of_text_and_of_other_parameters():
    """Only numbers count as absent, and only where upstream takes them so."""
    for plugin in (
        "{type: max-score-picker, parameters: {maxNumOfEndpoints: false}}",
        "{type: max-score-picker, parameters: {maxNumOfEndpoints: ''}}",
        "{type: prefix-cache-affinity-filter, parameters: {explorationProbability: -1}}",
    ):
        with pytest.raises(ConfigError, match="expected"):
            build(plugin)


@pytest.mark.parametrize("scale", [0, -1])
def test_a_scale_of_matches_is_needed_where_their_length_counts(scale):
    """As upstream, which does not read it otherwise."""
    parameters = f"matchLengthScaleTokens: {scale}, matchLengthWeight"
    build(f"{{type: prefix-cache-scorer, parameters: {{{parameters}: 0}}}}")
    with pytest.raises(ConfigError, match="expected matchLengthScaleTokens above 0"):
        build(f"{{type: prefix-cache-scorer, parameters: {{{parameters}: 0.5}}}}")


def test_a_threshold_below_0_keeps_all_candidates():
    """As upstream, which takes it for off."""
    profile = build("{type: prefix-cache-affinity-filter, parameters: {affinityThreshold: -1}}")
    candidates = builders.loaded_candidates(7)
    context = builders.context(prompt_tokens=1000)
    (plugin,) = profile.filters
    assert plugin.filter(context, candidates) == candidates


@pytest.mark.parametrize(
    ("parameters", "is_read"),
    [
        ("peakPrefillThroughput: 0", True),
        ("peakPrefillThroughput: -5", True),
        ("peakPrefillThroughput: -5, maxTTFTPenaltyMs: 0", True),
        ("peakPrefillThroughput: 0, ttftSource: latencyPredictor", False),
        ("peakPrefillThroughput: 0, maxTTFTPenaltyMs: 0", False),
    ],
)
def test_an_estimate_by_throughput_needs_one(parameters, is_read):
    """As upstream, 0 is accepted where the throughput is not read."""
    plugin = f"{{type: prefix-cache-affinity-filter, parameters: {{{parameters}}}}}"
    if is_read:
        with pytest.raises(ConfigError, match="peakPrefillThroughput"):
            build(plugin)
    else:
        build(plugin)
