"""The upstream picker's file, and its grammar in a file of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config import factory, lint, loader, profile_builder
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.request import HttpRequest
from tests.support.config_text import EPP_HEAD, HEAD

SAMPLES = sorted((Path(__file__).parent.parent / "data" / "epp").glob("*.yaml"))
CHAT = HttpRequest(
    {":method": "POST", ":path": "/v1/chat/completions"},
    b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}',
)
PROFILE = """
plugins:
- {type: queue-scorer, name: queue}
- {type: least-request, parameters: {choices: 3}}
schedulingProfiles:
- name: mine
  plugins: [{pluginRef: queue, weight: 0.5}, {pluginRef: least-request}]
"""
ROLES = """
scheduling:
  profile:
    name: mine
    scorers: [{kind: queue-scorer, weight: 0.5}]
    picker: {kind: least-request, params: {choices: 3}}
"""


def read(text):
    document = loader.parse(text, where="file.yaml")
    return loader.settings(document), document.warnings


def resolved(text):
    document = loader.parse(text, where="file.yaml")
    return profile_builder.build_profile(loader.settings(document), where=document.where)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_published_configurations_load_and_route(path):
    """Every sample loads as it stands, routes over three endpoints, and is never degraded."""
    # Of the disaggregated one only the decode profile routes, which has to be allowed.
    allowed = loader.FlagOverride(("scheduling", "allow_unsupported"), value=True, flag="--flag")
    parts = factory.build(loader.settings(loader.read(path), [allowed]), where=str(path))
    labels = {"llm-d.ai/role": "decode", "zone": "a"}
    parts.store.set_endpoints([Endpoint(f"10.0.0.{i}:8000", labels=labels) for i in range(3)], 0.0)
    outcome = parts.director.route(CHAT, 1.0)
    assert isinstance(outcome, Decision)
    assert outcome.degraded == ""
    parts.director.release(parts.director.reserve(outcome, 1.0), 2.0)


def test_sample_configurations_exist():
    """The list above is not empty by mistake."""
    assert len(SAMPLES) == 10


def test_references_and_roles_give_the_same_profile():
    """A profile that refers to plugins is the one that lists them by roles in a file of ours."""
    theirs, _ = read(EPP_HEAD + PROFILE)
    ours, _ = read(HEAD + ROLES)
    built = [profile_builder.build_profile(settings, where="x") for settings in (theirs, ours)]
    assert built[0] == built[1]
    assert built[0].name == "mine"
    assert [(scorer.kind, weight) for scorer, weight in built[0].scorers] == [("queue-scorer", 0.5)]
    assert built[0].picker.choices == 3


@pytest.mark.parametrize(
    ("pickers", "kind", "is_ambiguous"),
    [
        ("", "max-score-picker", False),
        ("- type: weighted-random-picker\n", "weighted-random-picker", False),
        ("- {type: random-picker, name: r}\n- type: max-score-picker\n", "random-picker", True),
    ],
)
def test_a_profile_without_a_picker_has_that_of_the_file(pickers, kind, is_ambiguous):
    """Upstream gives such a profile any picker that the file declares, and else the best score."""
    text = EPP_HEAD + "plugins:\n- type: queue-scorer\n" + pickers
    text += "schedulingProfiles: [{name: mine, plugins: [{pluginRef: queue-scorer}]}]\n"
    assert resolved(text).picker.kind == kind
    warning = (
        "profile mine names none of the pickers r, max-score-picker: r is taken, where upstream "
        "takes any of them"
    )
    assert (warning in lint.find_warnings(read(text)[0])) == is_ambiguous


def test_the_old_group_is_read_with_a_warning():
    """Both API groups are accepted; the old one says what to write."""
    text = EPP_HEAD.replace("llm-d.ai", "inference.networking.x-k8s.io")
    settings, warnings = read(text)
    assert settings.scheduling.strategy == "weighted"
    assert warnings == (
        "apiVersion inference.networking.x-k8s.io/v1alpha1 is deprecated: write llm-d.ai/v1alpha1",
    )


def test_ignored_plugins_are_warnings():
    """Saturation detectors and unsupported plugins are accepted with a warning."""
    settings, warnings = read(
        EPP_HEAD
        + "saturationDetector: {pluginRef: utilization-detector}\nplugins: [{type: slo-headroom-tier-filter}]\n"
    )
    assert any("saturationDetector is deprecated" in warning for warning in warnings)
    assert any("slo-headroom-tier-filter" in warning for warning in lint.find_warnings(settings))


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        ("type: program-aware-fairness", "tenants take turns"),
        ("type: probabilistic-admitter", "priorities of objectives"),
        ("type: slo-headroom-tier-filter", "let the strategy adaptive"),
        (
            "type: prefix-cache-affinity-filter, parameters: {ttftSource: latencyPredictor}",
            "estimated by peakPrefillThroughput",
        ),
        ("type: destination-endpoint-served-verifier", "with --conformance-testing only"),
        (
            "type: single-profile-handler, parameters: {foo: x}",
            "parameters foo have no effect, as upstream",
        ),
    ],
)
def test_replaced_plugins_are_warnings(plugin, text):
    """A file that relies on certificates or policies does not start without a word."""
    settings, _ = read(EPP_HEAD + f"plugins: [{{{plugin}}}, {{type: max-score-picker}}]\n")
    assert any(text in warning for warning in lint.find_warnings(settings))


def test_gpu_attributes_name_the_missing_plugins():
    """The attribute alone does not say which plugins are missing."""
    scorer = "{type: endpoint-attribute-scorer, parameters: {attributeKey: GPUUtilization, "
    scorer += "algorithm: {type: linear_lower_is_better}}}"
    settings, _ = read(EPP_HEAD + f"plugins: [{scorer}, {{type: max-score-picker}}]\n")
    with pytest.raises(ConfigError) as raised:
        profile_builder.build_profile(settings, where="x")
    assert "dcgm-data-source" in str(raised.value)


def test_an_old_plugin_name_is_mapped_with_a_warning():
    """A deprecated type routes as its successor and says what to write instead."""
    settings, _ = read(
        EPP_HEAD + "plugins: [{type: precise-prefix-cache-scorer}, {type: max-score-picker}]\n"
    )
    built = profile_builder.build_profile(settings, where="x")
    assert [scorer.kind for scorer, _ in built.scorers] == ["prefix-cache-scorer"]
    assert any("prefix-cache-scorer" in warning for warning in lint.find_warnings(settings))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "low-queue-filter",
            "conditions=(UtilizationCondition(metric='waiting-queue', max_value=128.0),)",
        ),
        ("low-queue-filter, parameters: {threshold: 9}", "max_value=9.0"),
        (
            "active-request-filter, parameters: {maxRequests: 4, fallbackOnEmpty: true}",
            "conditions=(UtilizationCondition(metric='active-requests', max_value=4.0),), fallback_on_empty=True",
        ),
        ("lora-affinity-filter, parameters: {threshold: 0.5}", "AdapterSoftAffinity(share=0.5)"),
        ("least-queue-filter", "QueueRange()"),
        ("least-kv-cache-filter", "KvRange()"),
    ],
)
def test_old_filters_keep_their_parameters(text, wanted):
    """Filters of the gateway's picker mean the same under the names and parameters of today."""
    (built,) = resolved(EPP_HEAD + f"plugins: [{{type: {text}}}]\n").filters
    assert wanted in repr(built)


def test_parameters_that_are_null_have_their_default():
    """Go reads null as an absent key."""
    plugins = (
        "plugins:\n- {{type: low-queue-filter, parameters: {0}}}\n"
        "- {{type: prefix-cache-scorer, name: p, parameters: {1}}}\n"
        "- {{type: random-picker, name: {2}, parameters: {2}}}\n"
        "schedulingProfiles: [{{name: a, plugins: [{{pluginRef: low-queue-filter, weight: {2}}}, "
        "{{pluginRef: p}}]}}]\n"
    )
    written = resolved(EPP_HEAD + plugins.format("{threshold: null}", "{mode: null}", "null"))
    assert written == resolved(EPP_HEAD + plugins.format("{}", "{}", "").replace(": ,", ": ~,"))


def test_a_required_key_that_is_null_is_named():
    """It is there, so advice to add it would not help."""
    text = EPP_HEAD + "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: null}]\n"
    with pytest.raises(
        ConfigError, match=r"schedulingProfiles\[0\]\.name: expected text, got null"
    ):
        resolved(text)


def test_a_profile_whose_plugins_are_null_has_none():
    """It picks as one with an empty list does."""
    profiles = (
        "plugins: [{{type: queue-scorer}}]\nschedulingProfiles: [{{name: a, plugins: {0}}}]\n"
    )
    written = resolved(EPP_HEAD + profiles.format("null"))
    assert written == resolved(EPP_HEAD + profiles.format("[]"))


def test_a_decision_tree_is_a_tree():
    """The gateway's default becomes a tree with the filters it refers to."""
    (sample,) = (path for path in SAMPLES if path.stem == "gateway-decision-tree")
    profile = profile_builder.build_profile(loader.settings(loader.read(sample)), where="x")
    (built,) = profile.filters
    rest = "adapter-soft-affinity (then queue-range (then kv-range))"
    other = "queue-range (then adapter-soft-affinity (then kv-range))"
    assert repr(built.root) == f"utilization-filter (yes {rest}, no {other})"
    assert built.root.filter.conditions[0].max_value == 128


def test_a_decision_tree_may_refer_to_another_tree():
    """A reference to a tree stands for its root, at the end of a branch."""
    text = """plugins:
- {type: least-queue-filter}
- {type: decision-tree-filter, name: b, parameters: {current: {pluginRef: least-queue-filter}}}
- type: decision-tree-filter
  name: a
  parameters: {current: {pluginRef: least-queue-filter}, nextOnSuccess: {pluginRef: b}}
schedulingProfiles: [{name: x, plugins: [{pluginRef: a}]}]
"""
    assert repr(resolved(EPP_HEAD + text).filters[0].root) == "queue-range (yes queue-range)"


TREE = """plugins:
- {type: sheddable-capacity-filter, name: idle}
- {type: decision-tree-filter, name: t, parameters: %s}
schedulingProfiles: [{name: x, plugins: [{pluginRef: t}]}]
"""


@pytest.mark.parametrize(
    ("parameters", "spot", "hint"),
    [
        ("{current: {pluginRef: x}}", "current.pluginRef", "extproc check --plugins"),
        ("{current: {pluginRef: idle}}", "current.pluginRef", "utilization-filter"),
        ("{current: {}}", "current", "name a plugin, or write a tree"),
        ("{current: {decisionTree: {current: {pluginRef: idle}}}}", "current.dec", "deprecated"),
        ("{curent: {}}", "curent", "did you mean current?"),
        ("{current: {pluginRef: t}}", "", "in a circle"),
    ],
)
def test_errors_in_decision_trees_name_their_place(parameters, spot, hint):
    """References and nodes that cannot be, and trees without an end."""
    with pytest.raises(ConfigError) as raised:
        resolved(EPP_HEAD + TREE % parameters)
    assert raised.value.where.startswith(f"file.yaml: plugins[1].parameters{spot and '.' + spot}")
    assert hint in raised.value.fix


@pytest.mark.parametrize(
    ("handler", "routing"),
    [
        ("disagg-profile-handler, parameters: {profiles: {decode: d}}", "d"),
        ("disagg-profile-handler, parameters: {decodeProfile: d, prefillProfile: p}", "d"),
        ('disagg-profile-handler, parameters: {profiles: {decode: ""}}', "decode"),
        ("pd-profile-handler, parameters: {decodeProfile: d}", "d"),
        ('pd-profile-handler, parameters: {decodeProfile: ""}', "decode"),
        ('header-profile-handler, parameters: {defaultProfile: " d "}', "d"),
        ('header-profile-handler, parameters: {defaultProfile: " "}', "decode"),
    ],
)
def test_handlers_name_the_profile_that_routes(handler, routing):
    """The older parameters count too, and an empty name is the usual one, as upstream."""
    document = loader.parse(
        EPP_HEAD
        + f"plugins: [{{type: prefix-based-pd-decider}}, {{type: {handler}}}]\n"
        + f"schedulingProfiles: [{{name: p}}, {{name: {routing}}}]\n",
        where="file.yaml",
    )
    allowed = loader.FlagOverride(("scheduling", "allow_unsupported"), value=True, flag="--flag")
    settings = loader.settings(document, [allowed])
    assert profile_builder.build_profile(settings, where="file.yaml").name == routing


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("disagg-profile-handler", "header-profile-handler"),
        ("single-profile-handler", "pd-profile-handler"),
        ("header-profile-handler", "header-profile-handler, name: other"),
    ],
)
def test_a_file_has_one_profile_handler(first, second):
    """As upstream; two would both act."""
    text = f"plugins: [{{type: queue-scorer}}, {{type: {first}}}, {{type: {second}}}]\n"
    with pytest.raises(ConfigError) as raised:
        resolved(EPP_HEAD + text)
    assert raised.value.where == "file.yaml: plugins[2].type"
    assert raised.value.got == f"{first} and {second.split(',')[0]}"


def test_a_predicted_latency_file_routes_without_predictions():
    """Of its three profiles the one without predictions routes."""
    text = """plugins:
- {type: predicted-latency-profile-handler}
- {type: predicted-latency-scorer, parameters: {samplingMean: 1000.0}}
- {type: queue-scorer}
schedulingProfiles:
- {name: predicted-latency-routing, plugins: [{pluginRef: predicted-latency-scorer}]}
- {name: predicted-latency-no-routing, plugins: [{pluginRef: queue-scorer}]}
"""
    assert resolved(EPP_HEAD + text).name == "predicted-latency-no-routing"


@pytest.mark.parametrize(
    ("text", "spot", "fix"),
    [
        ("plugins: [{type: queue-scorrer}]", "plugins[0].type", "did you mean queue-scorer?"),
        (
            "plugins: [{type: load-aware-scorer, parameters: {treshold: 1}}]",
            "plugins[0].parameters.treshold",
            "did you mean threshold?",
        ),
        (
            "plugins: [{type: random-picker}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: x}]}]",
            "schedulingProfiles[0].plugins[0].pluginRef",
            "extproc check --plugins",
        ),
        ("plugins: [{type: queue-scorer}, {type: queue-scorer}]", "plugins[1].name", "another"),
        (
            "plugins: [{type: random-picker}, {type: max-score-picker}]",
            "schedulingProfiles[0]",
            "keep one",
        ),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a}, {name: b}]",
            "schedulingProfiles",
            "keep the profile",
        ),
        (
            "plugins: [{type: session-id-producer, parameters: {foo: x}}]",
            "plugins[0].parameters.foo",
            "remove it",
        ),
        (
            "plugins: [{type: soft-reflective-ceiling-policy, parameters: {foo: x}}]",
            "plugins[0].parameters.foo",
            "remove it",
        ),
        ("plugin: []", "plugin", "did you mean plugins?"),
        ("schedulingProfiles: [{nam: a}]", "schedulingProfiles[0].nam", "did you mean name?"),
        ("plugins: [{typ: queue-scorer}]", "plugins[0].typ", "did you mean type?"),
    ],
)
def test_errors_name_the_nearest_known_value(text, spot, fix):
    """Unknown types, parameters, references and keys name the place and the nearest known one."""
    with pytest.raises(ConfigError) as raised:
        resolved(EPP_HEAD + text + "\n")
    assert raised.value.where == f"file.yaml: {spot}"
    assert fix in raised.value.fix


@pytest.mark.parametrize("plugins", ["", "plugins: []\n", "plugins: null\n"])
def test_profiles_without_plugins_are_refused(plugins):
    """Their references lead nowhere, and upstream's default profile is not what they describe."""
    profiles = "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]\n"
    with pytest.raises(ConfigError, match="expected the key plugins"):
        read(EPP_HEAD + plugins + profiles)
    assert (
        read(EPP_HEAD + plugins + "schedulingProfiles: []\n")[0].scheduling.strategy == "weighted"
    )


@pytest.mark.parametrize(
    ("scheduling", "spot"),
    [
        ("{models: {a: {strategy: randum}}}", "models.a.strategy"),
        ("{profile: {pickr: {kind: random}}}", "profile.pickr"),
        (
            "{models: {a: {profile: {scorers: [{kind: in-flite}]}}}}",
            "models.a.profile.scorers[0].kind",
        ),
    ],
)
def test_errors_in_our_file_name_their_path(scheduling, spot):
    """Under `scheduling`, and under the model they are about."""
    with pytest.raises(ConfigError) as raised:
        resolved(HEAD + f"scheduling: {scheduling}\n")
    assert raised.value.where == f"file.yaml: scheduling.{spot}"


@pytest.mark.parametrize(
    ("text", "spot"),
    [
        ("scheduling: {plugins: [{type: queue-scorer}]}", "scheduling.plugins"),
        ("scheduling: {schedulingProfiles: [{name: a}]}", "scheduling.schedulingProfiles"),
        ("scheduling: {models: {a: {plugins: []}}}", "scheduling.models.a.plugins"),
        ("pools: [{name: x, scheduling: {plugins: []}}]", "pools[0].scheduling.plugins"),
    ],
)
def test_references_in_our_file_are_refused(text, spot):
    """The grammar of an EndpointPickerConfig is an error in a file of ours that says what to write."""
    with pytest.raises(ConfigError) as raised:
        read(HEAD + text + "\n")
    assert raised.value.where == f"file.yaml: {spot}"
    assert "which belongs to a file of kind EndpointPickerConfig" in raised.value.got
    assert "profile: {filters: " in raised.value.fix


def test_internal_fields_are_unknown_in_our_file():
    """A field that no file may have is unknown, and no error lists it."""
    with pytest.raises(ConfigError) as raised:
        read(HEAD + "scheduling: {_epp: {plugins: []}}\n")
    assert raised.value.where == "file.yaml: scheduling._epp"
    assert "_epp" not in raised.value.wanted


def test_an_unknown_type_lists_no_hundred_types():
    """The nearest type is named; the whole list only where the list is short."""
    with pytest.raises(ConfigError) as raised:
        resolved(EPP_HEAD + "plugins: [{type: queue-scorrer}]\n")
    assert raised.value.wanted == "a plugin type that exists"


def test_models_may_have_rules_of_their_own():
    """A model with a strategy of its own is routed by it, all others by the common one."""
    settings, _ = read(
        HEAD + "scheduling: {strategy: random, models: {m: {strategy: round-robin}}}\n"
    )
    parts = factory.build(settings)
    parts.store.set_endpoints([Endpoint("10.0.0.1:8000")], 0.0)
    other = HttpRequest(CHAT.headers, CHAT.body.replace(b'"m"', b'"n"'))
    assert parts.director.route(CHAT, 1.0).profile == "round-robin/m"
    assert parts.director.route(CHAT, 1.0).picker == "round-robin"
    assert parts.director.route(other, 1.0).profile == "random"
