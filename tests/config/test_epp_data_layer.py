"""Sections of an upstream file that refer to plugins."""

from __future__ import annotations

import pytest

from extproc.config import loader
from extproc.errors import ConfigError

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
PLUGINS = (
    "plugins: [{type: queue-scorer}, {type: metrics-data-source}, {type: file-discovery}, "
    "{type: metrics-data-source, name: m}]\n"
)


def warn(text):
    """Warnings of a file with the plugins above."""
    return loader.parse(HEAD + PLUGINS + text + "\n", where="f.yaml").warnings


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
    document = loader.parse(HEAD + plugins + text + "\n", where="f.yaml")
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
