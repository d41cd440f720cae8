"""Sections of an upstream file that refer to plugins."""

from __future__ import annotations

import pytest

from extproc.config import loader
from extproc.errors import ConfigError
from extproc.scheduling.load_bounds import (
    ConcurrencyDetector,
    SaturationRules,
    UtilizationDetector,
)
from tests.support.config_text import EPP_HEAD

PLUGINS = (
    "plugins: [{type: queue-scorer}, {type: metrics-data-source}, {type: file-discovery}, "
    "{type: metrics-data-source, name: m}]\n"
)


def warn(text):
    """Warnings of a file with the plugins above."""
    return loader.parse(EPP_HEAD + PLUGINS + text + "\n", where="f.yaml").warnings


@pytest.mark.parametrize(
    "text",
    [
        "dataLayer: {}",
        "dataLayer: {injectDefaults: true, sources: [{pluginRef: metrics-data-source}]}",
        "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: null}]}",
        "requestHandler: {parsers: [{pluginRef: openai-parser}]}",
        "saturationDetector: null",
        "requestHandler: {parsers: null}",
        "dataLayer: {injectDefaults: null, crossReplicaSyncerPluginRef: null}",
        # Upstream adds the extractor of its own source.
        "dataLayer: {sources: [{pluginRef: m, extractors: [{pluginRef: core-metrics-extractor}]}]}",
    ],
)
def test_sections_without_effect_are_read(text):
    """References to plugins of the file, and to types of parsers, need no warning."""
    assert warn(text) == ()


@pytest.mark.parametrize(
    ("text", "parse_bodies"),
    [
        ("", True),
        ("requestHandler: {parsers: []}", True),
        ("requestHandler: {parsers: [{pluginRef: passthrough-parser}]}", False),
        ("requestHandler: {parsers: [{pluginRef: raw}]}", False),
        (
            "requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: passthrough-parser}]}",
            True,
        ),
        # Upstream skips the parsers behind it.
        (
            "requestHandler: {parsers: [{pluginRef: passthrough-parser}, {pluginRef: openai-parser}]}",
            False,
        ),
        ("parser: {pluginRef: passthrough-parser}", False),
        (
            "parser: {pluginRef: passthrough-parser}\nrequestHandler: {parsers: [{pluginRef: openai-parser}]}",
            True,
        ),
    ],
)
def test_passthrough_parser_before_all_others_leaves_bodies_unparsed(text, parse_bodies):
    """It takes every request then; behind another one, it is as here."""
    plugins = "plugins: [{type: queue-scorer}, {type: passthrough-parser, name: raw}]\n"
    document = loader.parse(EPP_HEAD + plugins + text + "\n", where="f.yaml")
    assert loader.settings(document).parse_bodies is parse_bodies
    assert [
        warning for warning in document.warnings if "requestHandler.parsers" not in warning
    ] == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("requestHandler: {parser: []}", "requestHandler.parser: expected one of parsers"),
        ("requestHandler: {parsers: [{pluginRef: nope}]}", "requestHandler.parsers[0].pluginRef"),
        ("parser: {pluginRef: nope}", "parser.pluginRef"),
        ("dataLayer: {source: []}", "did you mean sources?"),
        (
            "dataLayer: {sources: [{pluginRef: metrics-source}]}",
            "did you mean metrics-data-source?",
        ),
        (
            "dataLayer: {sources: [{pluginRef: queue-scorer, extractors: [{pluginRef: x}]}]}",
            "dataLayer.sources[0].extractors[0].pluginRef",
        ),
        ("data: {sources: [{pluginRef: metrics-source}]}", "data.sources[0].pluginRef"),
        (
            (
                "dataLayer: {sources: [{pluginRef: metrics-data-source, "
                "extractors: [{pluginRef: core-metrics-extractor}]}]}"
            ),
            "dataLayer.sources[0].extractors[0].pluginRef",
        ),
        (
            (
                "dataLayer: {injectDefaults: false, sources: [{pluginRef: m, "
                "extractors: [{pluginRef: core-metrics-extractor}]}]}"
            ),
            "dataLayer.sources[0].extractors[0].pluginRef",
        ),
        ("dataLayer: {discovery: {pluginRef: null}}", "dataLayer.discovery"),
        ("saturationDetector: {bogus: null}", "saturationDetector.bogus"),
        ("dataLayer: {discovery: {pluginRef: files}}", "dataLayer.discovery.pluginRef"),
        ("dataLayer: {peerDiscovery: {pluginRef: x}}", "dataLayer.peerDiscovery.pluginRef"),
        ("dataLayer: {crossReplicaSyncerPluginRef: x}", "dataLayer.crossReplicaSyncerPluginRef"),
        ("saturationDetector: {pluginRef: x}", "saturationDetector.pluginRef"),
        ("saturationDetector: {pluginRef: m}", "saturationDetector.pluginRef"),
        (
            "saturationDetector: {queueDepthThreshold: 0}",
            "saturationDetector.queueDepthThreshold",
        ),
        ("flowControl: {saturationDetector: {pluginRef: x}}", "flowControl.saturationDetector."),
        ("flowControl: {usageLimitPolicyPluginRef: x}", "flowControl.usageLimitPolicyPluginRef"),
        ("flowControl: {maxRequest: 1}", "did you mean maxRequests?"),
    ],
)
def test_sections_that_upstream_refuses_are_refused(text, error):
    """Unknown keys, and references to plugins that the file does not have."""
    with pytest.raises(ConfigError) as refused:
        warn(text)
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("dataLayer: {injectDefaults: false}", "dataLayer.injectDefaults: false is not acted on"),
        (
            "dataLayer: {peerDiscovery: {pluginRef: queue-scorer}}",
            "dataLayer.peerDiscovery is not acted on",
        ),
        (
            "dataLayer: {crossReplicaSyncerPluginRef: queue-scorer, crossReplicaSyncInterval: 1s}",
            "dataLayer.crossReplicaSyncerPluginRef is not acted on",
        ),
    ],
)
def test_settings_without_effect_are_warnings(text, warning):
    """Settings of the data layer that change what upstream does."""
    (only,) = warn(text)
    assert only.startswith(warning)


@pytest.mark.parametrize(
    "text",
    [
        "saturationDetector: {pluginRef: null}",
        "featureGates: [flowControl]\nflowControl: {saturationDetector: {pluginRef: null}}",
    ],
)
def test_a_detector_that_is_null_is_that_of_upstream(text):
    """The only warning is that of a detector by name."""
    assert warn(text) == warn(text.replace("null", "utilization-detector"))


USUAL = SaturationRules(utilization=UtilizationDetector())


@pytest.mark.parametrize(
    ("section", "rules"),
    [
        ("{}", USUAL),
        ("{pluginRef: ''}", USUAL),
        ("{pluginRef: utilization-detector}", USUAL),
        (
            "{queueDepthThreshold: 7, metricsStalenessThreshold: 1s}",
            SaturationRules(utilization=UtilizationDetector(queue_depth_threshold=7)),
        ),
        (
            "{pluginRef: open}",
            SaturationRules(concurrency=ConcurrencyDetector(max_concurrency=8, headroom=0.5)),
        ),
    ],
)
@pytest.mark.parametrize("key", ["saturationDetector", "flowControl"])
@pytest.mark.parametrize("profile", ["queue-scorer", "open"])
def test_the_named_detector_decides_in_every_profile(section, rules, key, profile):
    """With its parameters, whether a profile runs it or not; of two sections, the newer one counts."""
    text = f"saturationDetector: {section}"
    if key == "flowControl":
        text = f"saturationDetector: {{queueDepthThreshold: 99}}\nflowControl: {{{text}}}"
    document = loader.parse(
        EPP_HEAD
        + "plugins: [{type: queue-scorer}, {type: concurrency-detector, name: open, parameters: "
        "{maxConcurrency: 8, headroom: 0.5, inFlightLoadProducerName: x}}]\n"
        f"schedulingProfiles: [{{name: p, plugins: [{{pluginRef: {profile}}}]}}]\n{text}\n",
        where="f.yaml",
    )
    endpoints = loader.FlagOverride(
        ("pool", "endpoints"), value=["10.0.0.1:8000"], flag="--endpoints"
    )
    assert loader.settings(document, [endpoints]).scheduling.saturation == rules


def test_without_a_named_detector_a_profile_decides():
    """As with a file of ours."""
    document = loader.parse(EPP_HEAD + PLUGINS, where="f.yaml")
    assert "scheduling" not in document.tree


def test_a_detector_that_does_not_gate_the_queue_is_a_warning():
    """Without the gate, or with a usage limit, it does here what it does upstream."""
    section = "flowControl: {saturationDetector: {pluginRef: utilization-detector}}"
    assert warn(section) == ()
    (warning,) = warn(f"featureGates: [flowControl]\n{section}")
    assert warning.startswith("saturationDetector does not say when requests wait")
    limit = "plugins: [{type: queue-scorer}, {type: priority-holdback-policy, parameters: {minCeiling: 0.5}}]"
    flow = section.replace("{sat", "{usageLimitPolicyPluginRef: priority-holdback-policy, sat")
    assert (
        loader.parse(
            f"{EPP_HEAD}{limit}\nfeatureGates: [flowControl]\n{flow}\n", where="f"
        ).warnings
        == ()
    )
    (warning,) = warn(section.replace("{sat", "{maxRequests: 5, sat"))
    assert "write featureGates: [flowControl]" in warning


@pytest.mark.parametrize("written", ["null", "false"])
def test_a_null_of_flow_control_is_a_default(written):
    """Go reads null as an absent key."""
    assert warn(f"featureGates: [flowControl]\nflowControl: {{enableEviction: {written}}}") == ()


def test_the_older_name_of_the_data_layer_is_read_with_a_warning():
    """The gateway's releases 1.3 and 1.4 call it `data`."""
    section = "{injectDefaults: false, sources: [{pluginRef: metrics-data-source}]}"
    old, other = warn(f"data: {section}")
    assert old == "data is deprecated: write dataLayer"
    assert other.startswith("data.injectDefaults: false is not acted on")
