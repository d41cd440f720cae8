"""An EndpointPickerConfig beside a document of ours, in one text."""

import pytest

from extproc.config import loader, profile_builder
from extproc.errors import ConfigError
from tests.support.config_text import EPP_HEAD, HEAD

PLUGINS = (
    "plugins:\n- {type: queue-scorer}\n- {type: metrics-data-source, parameters: {path: /m}}\n"
)
COST = """plugins:
- type: request-attribute-reporter
  parameters:
    attributes:
    - {key: {name: x-gateway-inference-request-cost}, expression: usage.prompt_tokens}
"""
GATE = "featureGates: [flowControl]\nflowControl: {maxRequests: 7}\n"


def read(theirs, ours):
    """The settings of two documents."""
    return loader.settings(
        loader.parse(f"{EPP_HEAD}{theirs}---\n{HEAD}{ours}\n", where="f.yaml"),
        [loader.FlagOverride(("pool", "endpoints"), value=["10.0.0.1:8000"], flag="--endpoints")],
    )


def test_a_document_of_ours_adds_settings():
    """Sections that both have are merged, and the plugins route."""
    settings = read(
        PLUGINS + GATE,
        "scrape: {verify_tls: true}\nflow_control: {busy_s: 0.5}\nlog: {requests: off}\n"
        "peer_sync: {peers: [replicas:9090]}\nscheduling: {fallbacks: 2}",
    )
    assert (settings.scrape.path, settings.scrape.verify_tls) == ("/m", True)
    assert (settings.flow_control.max_requests, settings.flow_control.busy_s) == (7, 0.5)
    assert settings.peer_sync.peers == ("replicas:9090",)
    assert settings.scheduling.fallbacks == 2
    assert settings.log.requests == "off"
    ((scorer, _),) = profile_builder.build_profile(settings, where="f").scorers
    assert scorer.kind == "queue-scorer"


def test_the_order_of_documents_and_empty_ones_do_not_matter():
    """As templates write them."""
    text = f"---\n{HEAD}seed: 3\n---\n# nothing\n---\n{EPP_HEAD}{PLUGINS}---\n"
    settings = loader.settings(loader.parse(text, where="f.yaml"))
    assert (settings.seed, settings.scrape.path) == (3, "/m")


def test_a_document_of_ours_replaces_the_default_profile():
    """An EndpointPickerConfig without plugins chooses no strategy."""
    assert read(GATE, "scheduling: {strategy: adaptive}").scheduling.strategy == "adaptive"
    assert read(GATE, "scheduling: {fallbacks: 1}").scheduling.strategy == "weighted"


@pytest.mark.parametrize("ours", ["strategy: adaptive", "goal: throughput", "fallbacks: 1"])
def test_a_strategy_of_ours_leaves_their_saturation_detector(ours):
    """The detector is written in the EndpointPickerConfig, where the strategy is only its default."""
    detector = "saturationDetector: {queueDepthThreshold: 50}\n"
    settings = read(detector, f"scheduling: {{{ours}}}")
    assert settings.scheduling.saturation.utilization.queue_depth_threshold == 50


@pytest.mark.parametrize(
    ("theirs", "ours", "place", "got"),
    [
        (PLUGINS, "scrape: {path: /n}", ": scrape.path", "both; there it is '/m'"),
        (GATE, "flow_control: {enabled: false}", ": flow_control.enabled", "there it is true"),
        (PLUGINS, "scheduling: {strategy: adaptive}", ": scheduling.strategy", "its plugins"),
        (COST, "responses: {request_cost: {completion: 4}}", ": responses.request_cost", "both"),
        (PLUGINS, "scrape: 7", ": scrape", "there it is a mapping with 1 keys"),
        (PLUGINS, f"---\n{HEAD}", ", document 3: kind", "a second ExtProcConfig"),
        (PLUGINS, "---\nkind: Service", ", document 3: kind", "Service"),
        (PLUGINS, "---\nseed: 1", ", document 3: kind", "null"),
        (PLUGINS, f"---\n{EPP_HEAD}", ", document 3: kind", "a second EndpointPickerConfig"),
        (PLUGINS, "seeds: 1", ": seeds", "unknown key seeds"),
    ],
)
def test_documents_that_do_not_fit_are_refused(theirs, ours, place, got):
    """The error names the setting, or the document."""
    with pytest.raises(ConfigError) as refused:
        read(theirs, ours)
    assert refused.value.where == "f.yaml" + place
    assert got in refused.value.got


@pytest.mark.parametrize(
    ("head", "wanted"),
    [("kind: ExtProcConfig\n", "the key apiVersion"), (HEAD.replace("v1alpha1", "v2"), "v1alpha1")],
)
def test_a_document_of_ours_needs_its_version(head, wanted):
    """That of the other document does not count for it."""
    with pytest.raises(ConfigError) as refused:
        loader.settings(loader.parse(f"{EPP_HEAD}{PLUGINS}---\n{head}", where="f.yaml"))
    assert wanted in refused.value.wanted


def test_all_errors_of_a_document_of_ours_are_collected():
    """Those of the EndpointPickerConfig end the search, as its values are converted ones."""
    text = (
        f"{EPP_HEAD}plugins: [{{type: no-such}}]\n---\n{HEAD}seed: x\nlimits: {{max_streams: -1}}\n"
    )

    def build(document):
        return profile_builder.build_profile(loader.settings(document), where="f.yaml")

    result, errors = loader.collect(loader.parse(text, where="f.yaml"), build)
    assert result is None
    assert [error.where.removeprefix("f.yaml: ") for error in errors] == [
        "seed",
        "limits.max_streams",
        "plugins[0].type",
    ]
