"""`customMetrics` of an upstream file as `scrape.extra_metrics`."""

from __future__ import annotations

import pytest

from extproc.config import lint, loader, profile_builder
from extproc.errors import ConfigError
from extproc.scheduling import framework

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"

# The example of upstream's page on this plugin, with a scorer and a filter that read the metric.
FILE = """
plugins:
- type: core-metrics-extractor
  parameters:
    engineConfigs:
    - name: vllm
      customMetrics:
      - {attributeKey: custom.queue_depth, metricSpec: 'custom_queue_depth{tier=gold}'}
      - {attributeKey: example.com/heat, metricSpec: 'heat{zone="a", rack=b}'}
- type: endpoint-attribute-scorer
  parameters:
    attributeKey: custom.queue_depth
    algorithm: {type: linear_lower_is_better}
- type: endpoint-attribute-filter
  parameters:
    attribute: example.com/heat
    algorithm: {type: threshold, threshold: {operator: LessThan, value: 90}}
- {type: queue-scorer}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: endpoint-attribute-scorer, weight: 2}
  - {pluginRef: endpoint-attribute-filter}
  - {pluginRef: queue-scorer}
"""


def read(text):
    """The settings of a file, and its warnings."""
    document = loader.parse(HEAD + text, where="f.yaml")
    endpoints = loader.FlagOverride(
        ("pool", "endpoints"), value=["10.0.0.1:8000"], flag="--endpoints"
    )
    settings = loader.settings(document, [endpoints])
    return settings, [*document.warnings, *lint.find_warnings(settings)]


def test_custom_metrics_are_read_and_plugins_find_them():
    """Attributes are extra metrics, and the profile reads them by that name."""
    settings, warnings = read(FILE)
    assert settings.scrape.extra_metrics == {
        "custom.queue_depth": "custom_queue_depth{tier=gold}",
        "example.com/heat": 'heat{zone="a", rack=b}',
    }
    assert warnings == []
    profile = profile_builder.build_profile(settings, where="f.yaml")
    readers = [
        plugin for plugin in profile.plugins if isinstance(plugin, framework.ExtraMetricReader)
    ]
    assert [sorted(plugin.extra_metrics) for plugin in readers] == [
        ["example.com/heat"],
        ["custom.queue_depth"],
    ]


def test_a_metric_of_several_engines_is_read_by_one_selector():
    """The first selector counts; a warning names the other one, and load of unknown engines."""
    settings, warnings = read(
        """
plugins:
- type: core-metrics-extractor
  parameters:
    engineConfigs:
    - {name: vllm, customMetrics: [{attributeKey: a, metricSpec: m}]}
    - {name: sglang, customMetrics: [{attributeKey: a, metricSpec: m}]}
    - {name: own, queuedRequestsSpec: q, customMetrics: [{attributeKey: a, metricSpec: n}]}
- {type: queue-scorer}
"""
    )
    assert settings.scrape.extra_metrics == {"a": "m"}
    assert warnings == [
        (
            "engine own: its load is not read from the metrics that the file names: engines are "
            "recognized by their own metrics"
        ),
        "engine own: n is not read: a is m for engines of all types",
    ]


@pytest.mark.parametrize(
    ("metric", "path"),
    [
        ("{attributeKey: a, metricSpec: 'a b'}", "customMetrics[0].metricSpec"),
        ("{attributeKey: a, metricSpec: ''}", "customMetrics[0].metricSpec"),
        ("{attributeKey: '', metricSpec: m}", "customMetrics[0].attributeKey"),
        ("{metricSpec: m}", "customMetrics[0]"),
        ("{attributeKey: a, metricSpecs: m}", "did you mean metricSpec?"),
    ],
)
def test_a_custom_metric_without_a_valid_name_or_selector_is_refused(metric, path):
    """The error names the entry in the file."""
    text = f"""
plugins:
- type: core-metrics-extractor
  parameters: {{engineConfigs: [{{name: vllm, customMetrics: [{metric}]}}]}}
"""
    with pytest.raises(ConfigError) as error:
        read(text)
    assert "plugins[0].parameters.engineConfigs[0]" in str(error.value)
    assert path in str(error.value)
