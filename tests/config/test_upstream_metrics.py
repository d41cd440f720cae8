"""`customMetrics` of an upstream file as `scrape.extra_metrics`."""

from __future__ import annotations

import pytest

from extproc.config import lint, loader, profile_builder
from extproc.errors import ConfigError
from extproc.scheduling import framework
from tests.support.config_text import EPP_HEAD

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
    producer: core-metrics-extractor
    algorithm: {type: linear_lower_is_better}
- type: endpoint-attribute-filter
  parameters:
    attribute: example.com/heat
    producer: core-metrics-extractor
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
    document = loader.parse(EPP_HEAD + text, where="f.yaml")
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
            "engine own: queuedRequestsSpec is not acted on: engines are recognized by metrics of "
            "their own, and other names are not looked for"
        ),
        "engine own: n is not read: a is m for engines of all types",
    ]


@pytest.mark.parametrize(
    ("engine", "unread"),
    [
        (
            "name: vllm, queuedRequestsSpec: 'fork:waiting', kvUsageSpec: 'vllm:kv_cache_usage_perc'",
            "engine vllm: queuedRequestsSpec is not acted on",
        ),
        ("name: sglang, cacheNumBlocksSpec: b, kvUsageSpec: u", "kvUsageSpec, cacheNumBlocksSpec"),
        ("name: vllm, queuedRequestsSpec: 'vllm:num_requests_running'", "queuedRequestsSpec"),
        ("name: vllm, loraSpec: l, cacheInfoSpec: c", "loraSpec, cacheInfoSpec are not acted on"),
        ("name: sglang, cacheBlockSizeLabelName: x", "cacheBlockSizeLabelName"),
        (
            "name: sglang, cacheInfoSpec: 'sglang:cache_config_info', cacheNumBlocksLabelName: num_pages",
            "",
        ),
        ("name: vllm, loraSpec: 'vllm:lora_requests_info'", ""),
        ("name: own, queuedRequestsSpec: 'vllm:num_requests_waiting'", ""),
        ("name: vllm, kvUsageSpec: 'vllm:gpu_cache_usage_perc', loraSpec: ''", ""),
        ("name: triton, runningRequestsSpec: nv_inference_exec_count", ""),
        (
            "name: t, kvUsageSpec: 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}'",
            "",
        ),
    ],
)
def test_metrics_that_are_not_read_are_warnings(engine, unread):
    """Names that no engine is read by, whatever the name of the engine; those of upstream are read."""
    _, warnings = read(
        "plugins:\n- {type: queue-scorer}\n- type: core-metrics-extractor\n"
        f"  parameters: {{engineConfigs: [{{{engine}}}]}}\n"
    )
    assert len(warnings) == bool(unread)
    assert all(unread in warning for warning in warnings)


def test_a_selector_of_load_that_is_none_is_refused():
    """The error names its place."""
    with pytest.raises(ConfigError) as refused:
        read(
            "plugins:\n- type: core-metrics-extractor\n"
            "  parameters: {engineConfigs: [{name: vllm, kvUsageSpec: 'a b'}]}\n"
        )
    assert "plugins[0].parameters.engineConfigs[0].kvUsageSpec" in str(refused.value)


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
