"""Sources of metrics and endpoints of an upstream file, and parameters without effect."""

from __future__ import annotations

import msgspec
import pytest

from extproc.config import lint, loader, profile_builder
from extproc.config.settings import ScrapeSection
from extproc.errors import ConfigError
from extproc.scrape.client_tls import TlsFiles
from extproc.testing import builders

HEAD = (
    "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- {type: queue-scorer}\n"
)


def read(text):
    """The settings of a file with a further plugin, and its warnings."""
    document = loader.parse(HEAD + text + "\n", where="f.yaml")
    endpoints = loader.FlagOverride(
        ("pool", "endpoints"), value=["10.0.0.1:8000"], flag="--endpoints"
    )
    settings = loader.settings(document, [endpoints])
    return settings, [*document.warnings, *lint.find_warnings(settings)]


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("- {type: metrics-data-source}", ("http", "/metrics")),
        (
            "- {type: metrics-data-source, parameters: {scheme: https, path: /server/metrics}}",
            ("https", "/server/metrics"),
        ),
        ("- {type: metrics-data-source, parameters: {path: m, port: null}}", ("http", "/m")),
        (
            (
                "- {type: metrics-data-source, name: m, parameters: {path: /m}}\n"
                "dataLayer: {sources: [{pluginRef: m}]}"
            ),
            ("http", "/m"),
        ),
        # An address without a path is that of the root, as upstream.
        ("- {type: metrics-data-source, parameters: {scheme: null, path: ''}}", ("http", "/")),
        # Upstream scrapes its own source in place of one that nothing names.
        ("- {type: metrics-data-source, name: m, parameters: {path: /m}}", ("http", "/metrics")),
        (
            (
                "- {type: metrics-data-source, parameters: {scheme: https}}\n"
                "- {type: models-data-source, parameters: {scheme: https, path: /v1/models}}"
            ),
            ("https", "/metrics"),
        ),
    ],
)
def test_the_page_of_a_metrics_source_is_scraped(text, page):
    """Scheme and path are those of the source that upstream scrapes."""
    settings, warnings = read(text)
    assert (settings.scrape.scheme, settings.scrape.path) == page
    assert warnings == []


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ("port: 9400", {"port": 9400}),
        ("port: null, interval: null", {}),
        ("interval: ''", {}),
        ("insecureSkipVerify: true, caCertPath: ''", {}),
        (
            "insecureSkipVerify: false, caCertPath: /a, clientCertPath: /c, clientKeyPath: /k",
            {
                "verify_tls": True,
                "tls": TlsFiles(ca_file="/a", cert_file="/c", key_file="/k"),
            },
        ),
        ("interval: 0s", {}),
        ("interval: 1s", {"busy_interval_s": 1.0}),
        ("interval: 5ms", {"busy_interval_s": 0.05}),
        (
            "interval: 10s",
            {"busy_interval_s": 10.0, "idle_interval_s": 10.0, "stale_after_s": 30.0},
        ),
    ],
)
def test_other_parameters_of_a_metrics_source_are_kept(parameters, keys):
    """Certificates are checked where upstream checks them; intervals leave loads known as by default."""
    settings, warnings = read(f"- {{type: metrics-data-source, parameters: {{{parameters}}}}}")
    assert settings.scrape == msgspec.structs.replace(ScrapeSection(), **keys)
    assert warnings == []


def test_a_page_beside_custom_metrics_is_scraped():
    """Both are keys of one section."""
    settings, _ = read(
        "- {type: metrics-data-source, parameters: {path: /m}}\n- type: core-metrics-extractor\n"
        "  parameters: {engineConfigs: [{name: v, customMetrics: [{attributeKey: a, metricSpec: b}]}]}"
    )
    assert settings.scrape.path == "/m"
    assert settings.scrape.extra_metrics == {"a": "b"}


def test_authorities_without_a_check_are_a_warning():
    """Upstream checks no certificate either unless the file asks for it."""
    _, (warning,) = read("- {type: metrics-data-source, parameters: {caCertPath: /ca}}")
    assert warning.startswith("scrape.tls.ca_file has no effect")


@pytest.mark.parametrize("key", ["clientCertPath", "clientKeyPath"])
def test_a_certificate_and_its_key_come_together(key):
    """As upstream."""
    with pytest.raises(ConfigError) as refused:
        read(f"- {{type: metrics-data-source, parameters: {{{key}: /file}}}}")
    assert refused.value.where.endswith("scrape.tls")


def test_flags_beat_the_page_of_the_file():
    """As upstream's flags do for its default source."""
    text = HEAD + "- {type: metrics-data-source, parameters: {path: /m}}\n"
    flag = loader.FlagOverride(("scrape", "path"), "/n", "--model-server-metrics-path")
    assert loader.settings(loader.parse(text, where="f"), [flag]).scrape.path == "/n"


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("models-data-source, parameters: {path: /m}", "path is not acted on"),
        ("models-data-source, parameters: {scheme: https}", "scheme https is not acted on"),
        ("models-data-source, parameters: {insecureSkipVerify: false}", "check of certificates is"),
        ("models-data-source, parameters: {caCertPath: /ca}", "check of certificates is"),
        ("inflight-load-producer, parameters: {addEstimatedOutputTokens: true}", "is not acted on"),
        (
            "approx-prefix-cache-producer, parameters: {lruCapacityPerServer: 9, autoTune: true}",
            "lruCapacityPerServer is not acted on",
        ),
        ("prefix-cache-scorer, parameters: {blockSize: 9}", "blockSize is not acted on"),
        ("utilization-detector, parameters: {metricsStalenessThreshold: 1s}", "is not acted on"),
        ("mm-embeddings-cache-producer, parameters: {cacheSizeInMBPerServer: 9}", "entriesPer"),
    ],
)
def test_ignored_parameters_are_warnings(text, warning):
    """A warning names the parameters that have no effect, and says what happens instead."""
    _, (only,) = read(f"- {{type: {text}}}")
    assert only.startswith(f"plugin {text.partition(',')[0]}: ")
    assert warning in only


@pytest.mark.parametrize(
    "text",
    [
        "metrics-data-source, parameters: {interval: '', insecureSkipVerify: true}",
        "inflight-load-producer, parameters: {addEstimatedOutputTokens: false}",
        "approx-prefix-cache-producer, parameters: {lruCapacityPerServer: 31250, autoTune: true}",
        "prefix-cache-scorer, parameters: {maxPrefixBlocksToMatch: 256, blockSize: null}",
        "utilization-detector, parameters: {metricsStalenessThreshold: 200ms}",
    ],
)
def test_defaults_of_upstream_need_no_warning(text):
    """A parameter that says what upstream does anyway is no surprise."""
    assert read(f"- {{type: {text}}}")[1] == []


def test_a_second_page_is_a_warning():
    """An endpoint is scraped at one page, that of the first source."""
    settings, (warning,) = read(
        "- {type: metrics-data-source, parameters: {path: /a}}\n"
        "- {type: metrics-data-source, name: b, parameters: {path: /b}}\n"
        "dataLayer: {sources: [{pluginRef: b}]}"
    )
    assert settings.scrape.path == "/a"
    assert warning.startswith("plugin b: its parameters are not acted on")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "- {type: metrics-data-source, parameters: {scheme: ftp}}",
            "plugins[1].parameters.scheme",
        ),
        ("- {type: metrics-data-source, parameters: {port: 0}}", "plugins[1].parameters.port"),
        (
            "- {type: metrics-data-source, parameters: {interval: 5}}",
            "plugins[1].parameters.interval",
        ),
        (
            "- {type: metrics-data-source, parameters: {interval: -1s}}",
            "plugins[1].parameters.interval",
        ),
        (
            "- {type: file-discovery}\ndataLayer: {discovery: {pluginRef: file-discovery}}",
            "plugins[1].parameters",
        ),
        ("- {type: topology-extractor, parameters: {shelf: x}}", "plugins[1].parameters.shelf"),
        (
            "- {type: topology-affinity-scorer, parameters: {topologyProducerName: [a]}}",
            "plugins[1].parameters.topologyProducerName",
        ),
    ],
)
def test_sources_that_upstream_refuses_are_refused(text, place):
    """A scheme that is none, a discovery without a file, and an extractor by no text."""
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert refused.value.where == f"f.yaml: {place}"


@pytest.mark.parametrize(
    ("section", "listed"),
    [
        ("dataLayer: {discovery: {pluginRef: f}}", "/etc/endpoints.yaml"),
        ("dataLayer: {}", ""),
    ],
)
def test_the_file_of_a_discovery_is_followed(section, listed):
    """The data layer has to name the plugin, as upstream."""
    text = "- {type: file-discovery, name: f, parameters: {path: /etc/endpoints.yaml}}\n" + section
    settings = loader.settings(loader.parse(HEAD + text, where="f"))
    assert settings.pool.endpoints_file == listed


@pytest.mark.parametrize(
    ("extractor", "reader", "scores"),
    [
        ("", "", [0.0, 0.2]),
        (", parameters: {zone: z}", "", [0.0, 0.2]),
        (", parameters: {rack: example.org/rack}", "", [0.2, 0.0]),
        (", name: t, parameters: {rack: example.org/rack}", "", [0.0, 0.2]),
        (
            ", name: t, parameters: {rack: example.org/rack}",
            ", parameters: {topologyProducerName: t}",
            [0.2, 0.0],
        ),
    ],
)
def test_labels_of_a_topology_extractor_are_read(extractor, reader, scores):
    """By the plugins that name the extractor, or its type of their own accord."""
    settings, warnings = read(
        f"- {{type: topology-extractor{extractor}}}\n- {{type: topology-affinity-scorer{reader}}}\n"
        f"- {{type: topology-affinity-filter, name: f, parameters: {{minAffinity: rack{reader and ', topologyProducerName: t'}}}}}\n"
        "schedulingProfiles: [{name: p, plugins: [{pluginRef: topology-affinity-scorer}, {pluginRef: f}]}]"
    )
    profile = profile_builder.build_profile(settings, where="f")
    candidates = [
        builders.candidate("a", labels={"example.org/rack": "r1"}),
        builders.candidate("b", labels={"topology.kubernetes.io/rack": "r1"}),
    ]
    context = builders.context(headers={"x-peer-topology": "rack=r1"})
    ((scorer, _),), (rack,) = profile.scorers, profile.filters
    assert scorer.score(context, candidates) == scores
    assert rack.filter(context, candidates) == [candidates[scores.index(0.2)]]
    assert warnings == []
