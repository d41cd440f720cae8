"""`flowControl` of an upstream file as `flow_control`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from extproc.config import lint, loader
from extproc.config.settings import FlowControlSection
from extproc.errors import ConfigError
from extproc.flow_control.priority_band import BandSettings, PrioritySettings
from extproc.routing.usage_limit import UsageLimit
from tests.support.config_text import EPP_HEAD

GATE = "featureGates: [flowControl]\n"


def read(text):
    """The section that a file with the gate results in, and its warnings."""
    document = loader.parse(EPP_HEAD + text, where="f.yaml")
    endpoints = loader.FlagOverride(
        ("pool", "endpoints"), value=["10.0.0.1:8000"], flag="--endpoints"
    )
    settings = loader.settings(document, [endpoints])
    return settings.flow_control, [*document.warnings, *lint.find_warnings(settings)]


def test_without_the_feature_gate_nothing_is_queued():
    """Upstream ignores the section then; a warning says so."""
    holding, warnings = read("flowControl: {maxRequests: 5}\n")
    assert holding == FlowControlSection()
    assert len(warnings) == 1
    assert "write featureGates: [flowControl]" in warnings[0]
    assert read("featureGates: []\n") == (FlowControlSection(), [])


@pytest.mark.parametrize(
    ("gates", "enabled"),
    [
        ("[flowControl=true]", True),
        ("[flowControl= T]", True),
        ("[flowControl=1]", True),
        ("[flowControl, flowControl=False]", False),
        ("[flowControl=f, haPopulateNonLeaderDatastore, flowControl]", True),
        ("[haPopulateNonLeaderDatastore=true]", False),
        ("null", False),
    ],
)
def test_feature_gates_have_values(gates, enabled):
    """A name alone enables the gate, and the last entry counts."""
    holding, warnings = read(f"featureGates: {gates}\n")
    assert (holding.enabled, warnings) == (enabled, [])


@pytest.mark.parametrize(
    ("gates", "place"),
    [
        ("[dataLayer, flowControl=on]", "featureGates[1]"),
        ("[dataLayer=]", "featureGates[0]"),
        ("[{flowControl: true}]", "featureGates[0]"),
        ("flowControl", "featureGates"),
        ("[flowcontrol]", "did you mean flowControl?"),
        ("[FlowControl=true]", "did you mean flowControl?"),
        ("[flowControl, burst]", "featureGates[1]"),
    ],
)
def test_feature_gates_that_upstream_refuses_are_refused(gates, place):
    """A name that no release has, a value that is no boolean, and what is no list of texts."""
    with pytest.raises(ConfigError) as refused:
        read(f"featureGates: {gates}\n")
    assert place in str(refused.value)


@pytest.mark.parametrize(
    "gate",
    [
        "dataLayer",
        "enableLegacyMetrics",
        "prepareDataPlugins",
        "haPopulateNonLeaderDatastore=false",
    ],
)
def test_feature_gates_without_effect_are_warnings(gate):
    """Gates of earlier releases, and a gate that would stop replicas from picking."""
    holding, (warning,) = read(f"featureGates: [{gate}]\n")
    assert holding == FlowControlSection()
    assert warning.startswith(f"the feature gate {gate} ")


def test_the_feature_gate_alone_enables_upstream_defaults():
    """One flow per priority by arrival, and a minute, also without endpoints."""
    holding, warnings = read(GATE)
    assert holding == FlowControlSection(
        enabled=True, timeout_s=60.0, empty_timeout_s=60.0, fairness="none", order="fcfs"
    )
    assert warnings == []


@pytest.mark.parametrize(
    ("section", "waits"),
    [
        ("{defaultRequestTTL: 0s}", (3600.0, 3600.0)),
        ("{defaultRequestTTL: 0}", (3600.0, 3600.0)),
        ("{defaultRequestTTL: 30s, noEndpointRequestTTL: 10m}", (30.0, 600.0)),
        ("{noEndpointRequestTTL: 0s}", (60.0, 3600.0)),
    ],
)
def test_times_to_live_are_waits(section, waits):
    """0 is as long as Envoy lets a request wait; the one without endpoints follows the other one."""
    holding, warnings = read(f"{GATE}flowControl: {section}\n")
    assert ((holding.timeout_s, holding.empty_timeout_s), warnings) == (waits, [])


def test_supported_fields_are_mapped_without_a_warning():
    """Bounds, the time to live, bands without bounds of their own, and policies by reference."""
    holding, warnings = read(
        GATE
        + """
plugins:
- {type: queue-scorer}
- {type: round-robin-fairness-policy, name: turns}
- {type: slo-deadline-ordering-policy}
flowControl:
  maxRequests: 2k
  maxBytes: 1.5Gi
  defaultRequestTTL: 1m30s
  defaultPriorityBand: {fairnessPolicyRef: turns, orderingPolicyRef: slo-deadline-ordering-policy}
  priorityBands:
  - {priority: 5, fairnessPolicyRef: turns, orderingPolicyRef: slo-deadline-ordering-policy}
"""
    )
    assert warnings == []
    assert (holding.max_requests, holding.max_bytes) == (2000, 3 * 2**29)
    assert holding.timeout_s == holding.empty_timeout_s == 90.0
    assert (holding.fairness, holding.order) == ("round-robin", "slo")


@pytest.mark.parametrize("written", [True, False])
def test_eviction_is_a_switch_of_ours(written):
    """Off by default, as upstream."""
    section = f"flowControl: {{enableEviction: {str(written).lower()}}}\n"
    assert read(GATE + section)[0].eviction is written
    assert read(GATE)[0].eviction is False


def test_unsupported_fields_are_warnings():
    """Each field with its place, and what happens in its stead."""
    holding, warnings = read(
        GATE
        + """
flowControl:
  defaultRequestTTL: 2h
  noEndpointRequestTTL: 3h
  usageLimitPolicyPluginRef: soft-reflective-ceiling-policy
  defaultPriorityBand: {fairnessPolicyRef: program-aware-fairness}
"""
    )
    assert (holding.timeout_s, holding.fairness, holding.order) == (3600.0, "round-robin", "fcfs")
    begins = [
        "flowControl.defaultRequestTTL: 7200 s",
        "flowControl.noEndpointRequestTTL: 10800 s",
        "flowControl.defaultPriorityBand.fairnessPolicyRef: program-aware-fairness is not built",
        "flowControl.usageLimitPolicyPluginRef: soft-reflective-ceiling-policy is not acted on",
    ]
    assert len(warnings) == len(begins)
    assert warnings[2].endswith(": round-robin is used in its place")
    for warning, begin in zip(warnings, begins, strict=True):
        assert warning.startswith(begin)


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        ("type: static-usage-limit-policy", None),
        ("type: static-usage-limit-policy, parameters: {threshold: null}", None),
        ("type: static-usage-limit-policy, parameters: {threshold: 1.0}", None),
        (
            "type: static-usage-limit-policy, parameters: {threshold: 0.8}",
            UsageLimit(min_ceiling=0.8, max_ceiling=0.8),
        ),
        (
            "type: priority-holdback-policy, parameters: {minCeiling: 0.4}",
            UsageLimit(min_ceiling=0.4),
        ),
        (
            (
                "type: priority-holdback-policy, parameters: "
                "{shape: linear, domain: value, minCeiling: 0, maxCeiling: 0.9}"
            ),
            UsageLimit(min_ceiling=0.0, max_ceiling=0.9, domain="value"),
        ),
    ],
)
def test_usage_limit_policies_are_converted(policy, limit):
    """The static one is equal ceilings; its default is that requests wait for an endpoint only."""
    holding, warnings = read(
        GATE + f"plugins: [{{type: queue-scorer}}, {{name: limit, {policy}}}]\n"
        "flowControl: {usageLimitPolicyPluginRef: limit}\n"
    )
    assert (holding.usage_limit, warnings) == (limit, [])


def test_a_usage_limit_policy_without_a_plugin_stands_for_its_type():
    """With its defaults, as upstream; one that no flow control names does nothing."""
    holding, warnings = read(
        f"{GATE}flowControl: {{usageLimitPolicyPluginRef: static-usage-limit-policy}}\n"
    )
    assert (holding.usage_limit, warnings) == (None, [])
    holding, warnings = read(
        GATE + "plugins: [{type: queue-scorer}, {type: priority-holdback-policy, "
        "parameters: {minCeiling: 0.4}}]\n"
    )
    assert (holding.usage_limit, warnings) == (None, [])


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("type: queue-scorer", "flowControl.usageLimitPolicyPluginRef: expected the name"),
        ("type: priority-holdback-policy", "plugins[0].parameters: expected the key minCeiling"),
        (
            "type: priority-holdback-policy, parameters: {minCeiling: 1}",
            "plugins[0].parameters.minCeiling",
        ),
        (
            "type: priority-holdback-policy, parameters: {minCeiling: 0.5, maxCeiling: 0.5}",
            "expected a minCeiling below maxCeiling (0.5)",
        ),
        (
            "type: priority-holdback-policy, parameters: {minCeiling: 0.5, shape: step}",
            "plugins[0].parameters.shape",
        ),
        (
            "type: static-usage-limit-policy, parameters: {threshold: 0}",
            "plugins[0].parameters.threshold",
        ),
    ],
)
def test_usage_limit_policies_that_upstream_refuses_are_refused(policy, error):
    """A plugin of another type, and parameters out of their range."""
    with pytest.raises(ConfigError) as refused:
        read(
            GATE + f"plugins: [{{name: limit, {policy}}}, {{type: kv-cache-utilization-scorer}}]\n"
            "flowControl: {usageLimitPolicyPluginRef: limit}\n"
        )
    assert error in str(refused.value)


def test_bands_are_converted():
    """Each with its bounds and policies; the usual ones, not those of the default, where it has none."""
    holding, warnings = read(
        GATE
        + """
flowControl:
  maxBytes: 1Gi
  defaultPriorityBand: {priority: 3, maxBytes: 1Gi, fairnessPolicyRef: round-robin-fairness-policy}
  defaultNegativePriorityBand: {priority: 0, maxRequests: 1, orderingPolicyRef: edf-ordering-policy}
  priorityBands:
  - {priority: 7, maxRequests: 5, maxBytes: 0}
  - {orderingPolicyRef: edf-ordering-policy}
"""
    )
    assert warnings == []
    assert (holding.fairness, holding.order) == ("round-robin", "fcfs")
    assert holding.default_band == BandSettings(max_bytes=2**30)
    usual = BandSettings(fairness="none", order="edf")
    assert holding.default_negative_band == replace(usual, max_requests=1)
    assert holding.bands == (
        PrioritySettings(priority=7, max_requests=5, fairness="none", order="fcfs"),
        PrioritySettings(priority=0, fairness="none", order="edf"),
    )


@pytest.mark.parametrize("priority", ["priority: 0, ", "priority: null, ", ""])
def test_a_band_without_a_priority_is_that_of_zero(priority):
    """As upstream, which reads an absent number as 0."""
    holding, warnings = read(
        GATE + f"flowControl: {{priorityBands: [{{{priority}orderingPolicyRef: "
        "edf-ordering-policy, fairnessPolicyRef: round-robin-fairness-policy}]}\n"
    )
    assert (holding.fairness, holding.order, warnings) == ("none", "fcfs", [])
    assert holding.bands == (PrioritySettings(priority=0, fairness="round-robin", order="edf"),)


@pytest.mark.parametrize(
    ("section", "fixture"),
    [
        ("{maxRequest: 5}", "flowControl.maxRequest"),
        ("{maxRequests: -5}", "flowControl.maxRequests"),
        ("{maxBytes: 1 GB}", "flowControl.maxBytes"),
        ("{maxBytes: true}", "flowControl.maxBytes"),
        ("{defaultRequestTTL: 60}", "flowControl.defaultRequestTTL"),
        ("{defaultRequestTTL: 1 min}", "flowControl.defaultRequestTTL"),
        ("{noEndpointRequestTTL: -5s}", "flowControl.noEndpointRequestTTL"),
        ("{saturationDetector: {plugin: x}}", "flowControl.saturationDetector.plugin"),
        ("{enableEviction: 5}", "flowControl.enableEviction"),
        ("{priorityBands: 5}", "flowControl.priorityBands"),
        ("{priorityBands: [5]}", "flowControl.priorityBands[0]"),
        ("{priorityBands: [{prio: 5}]}", "flowControl.priorityBands[0].prio"),
        ("{priorityBands: [{priority: high}]}", "flowControl.priorityBands[0].priority"),
        ("{priorityBands: [{priority: 2147483648}]}", "flowControl.priorityBands[0].priority"),
        ("{priorityBands: [{}, {priority: 0}]}", "flowControl.priorityBands[1].priority"),
        ("{priorityBands: [{maxBytes: -1}]}", "flowControl.priorityBands[0].maxBytes"),
        ("{defaultPriorityBand: {fairnessPolicyRef: x}}", "defaultPriorityBand.fairnessPolicyRef"),
        (
            "{defaultPriorityBand: {orderingPolicyRef: program-aware-fairness}}",
            "defaultPriorityBand.orderingPolicyRef",
        ),
        ("[1]", "flowControl"),
    ],
)
def test_values_that_upstream_refuses_are_refused(section, fixture):
    """With the place of the value, what was wanted and what to write."""
    with pytest.raises(ConfigError) as refused:
        read(f"{GATE}flowControl: {section}\n")
    assert fixture in str(refused.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", None), ("1", 1), ("1500m", 2), ("1e3", 1000), ("1Ki", 1024), ("0.5M", 500_000)],
)
def test_quantities_follow_kubernetes(text, number):
    """Suffixes of both kinds, exponents and thousandths, rounded up; 0 is no bound."""
    holding, _ = read(f"{GATE}flowControl: {{maxBytes: {text}}}\n")
    assert holding.max_bytes == (FlowControlSection().max_bytes if number is None else number)
