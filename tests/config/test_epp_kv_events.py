"""Exact prefix cache plugins of an EndpointPickerConfig as the section `kv_events`."""

import pytest

from extproc.config import lint, loader, profile_builder
from extproc.errors import ConfigError

HEAD = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
"""

SPLIT = """\
plugins:
- type: token-producer
  parameters:
    modelName: base/model
    vllm: {url: http://localhost:8000/, timeout: 5s, mmTimeout: 30s}
- type: endpoint-notification-source
- type: single-profile-handler
- type: decode-filter
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: 64, hashSeed: "42", hashAlgorithm: xxh64}
    speculativeIndexing: true
    speculativeTTL: 2s
    indexerConfig:
      kvBlockIndexConfig: {enableMetrics: true}
    kvEventsConfig:
      topicFilter: kv@
      engineType: sglang
      concurrency: 32
      discoverPods: true
      podDiscoveryConfig: {socketPort: 6557, replaySocketPort: 6558, podLabelSelector: a=b}
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
- type: max-score-picker
dataLayer:
  sources:
  - pluginRef: endpoint-notification-source
    extractors: [{pluginRef: precise-prefix-cache-producer}]
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: decode-filter
  - {pluginRef: prefix-cache-scorer, weight: 2.0}
  - pluginRef: max-score-picker
"""


def read(text):
    document = loader.parse(HEAD + text, where="x")
    settings = loader.settings(document)
    warnings = [*document.warnings, *lint.find_warnings(settings)]
    return settings, [warning for warning in warnings if "no endpoints" not in warning]


def plugins(*entries):
    return "plugins:\n" + "".join(f"- {{{entry}}}\n" for entry in (*entries, PICKER))


PICKER = "type: max-score-picker"
PRODUCER = "type: precise-prefix-cache-producer"


def test_the_split_pipeline_reads_events_and_renders():
    """Ports, replay and renderer are taken over, and only the metrics of the index are missing."""
    settings, warnings = read(SPLIT)
    events = settings.kv_events
    assert (events.enabled, events.port, events.replay_port) == (True, 6557, 6558)
    assert (events.render_url, events.render_model) == ("http://localhost:8000", "base/model")
    (warning,) = warnings
    assert warning.startswith(f"plugin {PRODUCER[6:]}: enableMetrics is not acted on: ")
    assert read(SPLIT.replace("enableMetrics: true", "enableMetrics: false"))[1] == []
    profile = profile_builder.build_profile(settings, where="x")
    assert [(scorer.kind, weight) for scorer, weight in profile.scorers] == [
        ("prefix-cache-scorer", 2.0)
    ]


def test_a_producer_without_parameters_has_the_ports_of_upstream():
    """5557, and no replay; engines render."""
    settings, warnings = read(plugins(PRODUCER, "type: token-producer"))
    events = settings.kv_events
    assert (events.enabled, events.port, events.replay_port) == (True, 5557, 0)
    assert (events.render_url, events.render_model) == ("", "")
    assert not warnings


def test_weights_of_tiers_are_those_of_the_file():
    """The device counts in full here as well."""
    backends = "[{name: gpu, weight: 1.0}, {name: cpu, weight: 0.6}]"
    parameters = f"{{indexerConfig: {{kvCacheBackendConfigs: {backends}}}}}"
    settings, warnings = read(
        plugins(f"type: precise-prefix-cache-producer, parameters: {parameters}")
    )
    assert settings.kv_events.cpu_weight == 0.6
    assert not warnings


def test_a_tokenizer_on_this_machine_is_used(tmp_path):
    """Of token-producer and of the older scorer; one that is elsewhere is not."""
    pytest.importorskip("tokenizers", reason="the extra tokenizer is not installed")
    folders = f"{{modelTokenizerMap: {{m: {tmp_path}/tokenizer.json}}, socketFile: x}}"
    tokenizer = f"type: token-producer, parameters: {{modelName: m, udsTokenizerConfig: {folders}}}"
    pool = f"tokenizersPoolConfig: {{modelName: m, local: {folders}, hf: {{enabled: false}}}}"
    scorer = f"type: precise-prefix-cache-scorer, parameters: {{indexerConfig: {{{pool}}}}}"
    settings, warnings = read(plugins(PRODUCER, tokenizer))
    assert settings.kv_events.tokenizer_path == ""
    assert "udsTokenizerConfig is not acted on" in "".join(warnings)
    (tmp_path / "tokenizer.json").write_text("{}")
    settings, warnings = read(plugins(PRODUCER, tokenizer))
    assert settings.kv_events.tokenizer_path == str(tmp_path)
    assert not warnings
    assert read(plugins(scorer))[0].kv_events.tokenizer_path == str(tmp_path)


def test_engines_that_connect_are_waited_for_without_discovery():
    """An address that cannot be listened on is refused; several pools have no port each."""
    parameters = "{kvEventsConfig: {discoverPods: false, zmqEndpoint: 'tcp://*:5600'}}"
    producer = f"type: precise-prefix-cache-producer, parameters: {parameters}"
    settings, warnings = read(plugins(producer))
    assert (settings.kv_events.enabled, settings.kv_events.bind) == (True, "tcp://*:5600")
    assert not warnings
    with pytest.raises(ConfigError, match="zmqEndpoint"):
        read(plugins(producer.replace("tcp://*:5600", "ipc:///tmp/events")))
    pools = "pools: [{name: a, endpoints: ['10.0.0.1:8000']}]"
    events = 'kv_events: {enabled: true, bind: "tcp://[::1]:5557"}'
    head = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
    with pytest.raises(ConfigError, match="a single pool"):
        loader.settings(loader.parse(f"{head}{pools}\n{events}\n", where="x"))


def test_a_file_without_the_plugins_reads_no_events():
    """The estimate is what upstream's approximate producer does."""
    settings, _ = read(plugins("type: approx-prefix-cache-producer"))
    assert not settings.kv_events.enabled


def test_the_older_scorer_brings_its_producer():
    """With its parameters, of earlier releases too, unless the file has a producer."""
    scorer = (
        "type: precise-prefix-cache-scorer, parameters: {indexerConfig: {tokenizersPoolConfig: "
        "{modelName: m}, prefixStoreConfig: {cacheSize: 1}}, kvEventsConfig: {podDiscoveryConfig: "
        "{socketPort: 7000}}}"
    )
    settings, warnings = read(plugins(scorer))
    assert (settings.kv_events.enabled, settings.kv_events.port) == (True, 7000)
    assert any("write precise-prefix-cache-producer" in warning for warning in warnings)
    settings, _ = read(plugins(scorer, PRODUCER))
    assert settings.kv_events.port == 5557


@pytest.mark.parametrize(
    ("parameters", "bind"),
    [
        ("kvEventsConfig: {zmqEndpoint: 'tcp://0.0.0.0:5600'}", "tcp://0.0.0.0:5600"),
        ("kvCacheRedisAddr: 'redis://localhost:6379'", "tcp://*:5557"),
        ("kvEventsConfig: {discoverPods: true}, indexerConfig: {prefixStoreConfig: {}}", ""),
    ],
)
def test_a_tracking_prefix_cache_scorer_reads_events(parameters, bind):
    """The form of earlier releases is the scorer with a producer, to which engines connect."""
    scorer = f"type: prefix-cache-scorer, parameters: {{mode: cache_tracking, {parameters}}}"
    profile = "schedulingProfiles: [{name: a, plugins: [{pluginRef: prefix-cache-scorer}]}]\n"
    settings, warnings = read(plugins(scorer) + profile)
    assert (settings.kv_events.enabled, settings.kv_events.bind) == (True, bind)
    built = profile_builder.build_profile(settings, where="x")
    assert [scorer.kind for scorer, _ in built.scorers] == ["prefix-cache-scorer"]
    assert any("mode cache_tracking is of earlier releases" in warning for warning in warnings)
    assert any("kvCacheRedisAddr" in warning for warning in warnings) == ("Redis" in parameters)


def test_an_estimating_prefix_cache_scorer_reads_no_events():
    """The mode was the default of earlier releases, and any other is refused."""
    scorer = "type: prefix-cache-scorer, parameters: {mode: estimate, hashBlockSize: 64}"
    settings, warnings = read(plugins(scorer))
    assert not settings.kv_events.enabled
    assert not warnings
    with pytest.raises(ConfigError, match="one of cache_tracking, estimate"):
        read(plugins(scorer.replace("estimate", "precise")))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            [PRODUCER + ", parameters: {kvEventsConfig: {discoverPods: false}}"],
            "no KV events are read with discoverPods: false and no zmqEndpoint",
        ),
        (
            [PRODUCER + ", parameters: {kvEventsConfig: {zmqEndpoint: 'tcp://0.0.0.0:5557'}}"],
            "zmqEndpoint is not bound",
        ),
        ([PRODUCER + ", parameters: {speculativeTTL: 10s}"], "counts as on its way for 2 s"),
        (
            [
                PRODUCER
                + ", parameters: {indexerConfig: {kvCacheBackendConfigs: [{name: ssd, weight: 0.8}]}}"
            ],
            "by kv_events.storage_weight",
        ),
        (
            ["type: token-producer, parameters: {modelName: m}"],
            "no tokenizer is asked without precise-prefix-cache-producer",
        ),
        (
            [PRODUCER, "type: tokenizer, parameters: {modelName: m, udsTokenizerConfig: {a: b}}"],
            "engines are asked for the tokens",
        ),
        (
            ["type: token-producer, parameters: {estimate: {image: {mode: static}}}"],
            "estimate is not acted on",
        ),
    ],
)
def test_settings_without_a_counterpart_are_warnings(entries, text):
    """A file that relies on them does not start without a word."""
    _, warnings = read(plugins(*entries))
    assert any(text in warning for warning in warnings)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            [PRODUCER + ", parameters: {kvEventsConfig: {podDiscoveryConfig: {socketPort: 0}}}"],
            "plugins[0].parameters.kvEventsConfig.podDiscoveryConfig.socketPort",
        ),
        (
            [PRODUCER + ", parameters: {kvEventsConfig: {topicFilters: kv@}}"],
            "did you mean topicFilter?",
        ),
        ([PRODUCER + ", parameters: {kvEventsConfig: {engineType: trtllm}}"], "engineType"),
        ([PRODUCER + ", parameters: {speculativeTTL: soon}"], "write 2s"),
        (
            [PRODUCER + ", parameters: {indexerConfig: {tokenizersPoolConfig: {}}}"],
            "no tokenizers in this plugin",
        ),
        (
            [
                PRODUCER,
                PRODUCER
                + ", name: b, parameters: {kvEventsConfig: {podDiscoveryConfig: {socketPort: 1}}}",
            ],
            "keep one of the producers",
        ),
        (
            [PRODUCER, "type: token-producer, parameters: {vllm: {url: 'http://a'}}"],
            "the model of the renderer",
        ),
        (
            [PRODUCER, "type: token-producer, parameters: {modelName: m, estimate: {}}"],
            "remove estimate",
        ),
        (
            [PRODUCER, "type: token-producer, parameters: {modelName: m, vllm: {url: 'a:1'}}"],
            "render_url",
        ),
    ],
)
def test_wrong_parameters_are_refused(entries, text):
    """With the place, and what to do."""
    with pytest.raises(ConfigError) as raised:
        read(plugins(*entries))
    assert text in str(raised.value)
