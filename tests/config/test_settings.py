import inspect
import re

import msgspec
import pytest

from extproc.config import lint, pool_sections, settings
from extproc.config.autoscaling import AutoscalingSection
from extproc.flow_control.priority_band import BandSettings, PrioritySettings
from extproc.routing import pool_match
from extproc.routing.usage_limit import UsageLimit
from extproc.scheduling.load_bounds import SaturationRules, UtilizationDetector
from extproc.scrape.kv_event_subscriber import KvEventsSection


def structs():
    return [
        member
        for module in (settings, pool_sections)
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, msgspec.Struct) and member.__module__ == module.__name__
    ]


@pytest.mark.parametrize("section", structs(), ids=lambda section: section.__name__)
def test_every_field_is_documented(section):
    """Every field has an entry in its section's docstring, and no entry is without a field."""
    documented = []
    for cls in section.__mro__:
        attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2]
        documented += re.findall(r"^ {4}(\w+): \S", attributes, re.MULTILINE)
    if section.__base__ is msgspec.Struct:
        assert documented == list(dict.fromkeys(documented))
    assert set(documented) == set(section.__struct_fields__)


@pytest.mark.parametrize("section", structs(), ids=lambda section: section.__name__)
def test_numbers_have_units(section):
    """A number that measures something says in its name or its text in which unit."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.default, bool) or not isinstance(field.default, int | float):
            continue
        texts = "\n".join(inspect.cleandoc(cls.__doc__ or "") for cls in section.__mro__)
        entry = re.search(
            rf"^ {{4}}{field.name}: (.*?)(?=^ {{4}}\w|\Z)",
            texts,
            re.MULTILINE | re.DOTALL,
        )
        named = field.name.endswith(("_s", "_ms", "_bytes", "port", "_share", "_ratio", "weight"))
        assert named or re.search(r"\((count|integer|bytes)\)|per second", entry[1]), field.name


@pytest.mark.parametrize("section", structs(), ids=lambda section: section.__name__)
def test_sections_are_strict_and_frozen(section):
    """Unknown keys are refused and nothing changes after the start."""
    assert section.__struct_config__.frozen
    assert section.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize(
    ("host", "address"),
    [("", "[::]:1"), ("0.0.0.0", "0.0.0.0:1"), ("::1", "[::1]:1"), ("localhost", "localhost:1")],
)
def test_grpc_address(host, address):
    """No host means every address of both families; IPv6 stands in brackets."""
    assert settings.ServerSection(host=host).grpc_address(1) == address


ENDPOINTS = pool_sections.PoolSource(endpoints=("10.0.0.1:8000",))

ADVISED = {
    "xds without fallbacks": (
        settings.Settings(pool=ENDPOINTS, xds=settings.XdsSection(enabled=True)),
        "scheduling.fallbacks",
    ),
    "no endpoints": (settings.Settings(), "refuses to start"),
    "stale while idle": (
        settings.Settings(pool=ENDPOINTS, scrape=settings.ScrapeSection(stale_after_s=2)),
        "stale_after_s",
    ),
    "busy slower than idle": (
        settings.Settings(pool=ENDPOINTS, scrape=settings.ScrapeSection(busy_interval_s=3)),
        "busy_interval_s",
    ),
    "message below body": (
        settings.Settings(pool=ENDPOINTS, limits=settings.LimitsSection(max_message_bytes=1)),
        "max_message_bytes",
    ),
    "share without feedback": (
        settings.Settings(
            pool=ENDPOINTS,
            responses=settings.ResponsesSection(feedback=False, stream_sample_ratio=0.5),
        ),
        "stream_sample_ratio",
    ),
    "bound events of several replicas": (
        settings.Settings(
            pool=ENDPOINTS,
            kv_events=KvEventsSection(enabled=True, bind="tcp://*:5557"),
            peer_sync=settings.PeerSyncSection(url="redis://redis"),
        ),
        "kv_events.bind and peer_sync.url",
    ),
    "bound events of replicas that exchange": (
        settings.Settings(
            pool=ENDPOINTS,
            kv_events=KvEventsSection(enabled=True, bind="tcp://*:5557"),
            peer_sync=settings.PeerSyncSection(peers=("peers:9090",)),
        ),
        "kv_events.bind and peer_sync.peers",
    ),
    "two lists of replicas": (
        settings.Settings(
            pool=ENDPOINTS,
            autoscaling=AutoscalingSection(peers=("a:9090",)),
            peer_sync=settings.PeerSyncSection(peers=("a:9090", "b:9090")),
        ),
        "autoscaling.peers and peer_sync.peers differ",
    ),
    "conformance": (settings.Settings(pool=ENDPOINTS, conformance=True), "conformance"),
    "seed": (settings.Settings(pool=ENDPOINTS, seed=1), "seed"),
    "subset ignored": (
        settings.Settings(
            pool=ENDPOINTS, scheduling=pool_sections.SchedulingSection(respect_subset=False)
        ),
        "respect_subset",
    ),
    "shadow of itself": (
        settings.Settings(
            pool=ENDPOINTS,
            scheduling=pool_sections.SchedulingSection(shadow=pool_sections.ShadowRules()),
        ),
        "nothing to compare",
    ),
    "shadow of no request": (
        settings.Settings(
            pool=ENDPOINTS,
            scheduling=pool_sections.SchedulingSection(
                shadow=pool_sections.ShadowRules(strategy="random", sample_ratio=0)
            ),
        ),
        "sample_ratio",
    ),
    "reject without lists": (
        settings.Settings(
            pool=ENDPOINTS,
            scrape=settings.ScrapeSection(models=False),
            scheduling=pool_sections.SchedulingSection(unknown_model="reject"),
        ),
        "unknown_model",
    ),
    "saturation without loads": (
        settings.Settings(
            pool=ENDPOINTS,
            scrape=settings.ScrapeSection(enabled=False),
            scheduling=pool_sections.SchedulingSection(
                saturation=SaturationRules(utilization=UtilizationDetector())
            ),
        ),
        "scheduling.saturation.utilization has no effect",
    ),
    "a usage limit without loads": (
        settings.Settings(
            pool=ENDPOINTS,
            scrape=settings.ScrapeSection(enabled=False),
            flow_control=settings.FlowControlSection(
                enabled=True, usage_limit=UsageLimit(min_ceiling=0.5)
            ),
        ),
        "write scheduling.saturation.concurrency",
    ),
    "limits without flow control": (
        settings.Settings(
            pool=ENDPOINTS,
            flow_control=settings.FlowControlSection(
                limits={"team-a": settings.RateLimit(tokens_per_s=1.0)}
            ),
        ),
        "flow_control.limit and limits",
    ),
    "a usage limit without flow control": (
        settings.Settings(
            pool=ENDPOINTS,
            flow_control=settings.FlowControlSection(usage_limit=UsageLimit(min_ceiling=0.5)),
        ),
        "flow_control.usage_limit has no effect",
    ),
    "bands without flow control": (
        settings.Settings(
            pool=ENDPOINTS,
            flow_control=settings.FlowControlSection(default_band=BandSettings(max_requests=5)),
        ),
        "flow_control.default_band has no effect",
    ),
    "a band above all": (
        settings.Settings(
            pool=ENDPOINTS,
            flow_control=settings.FlowControlSection(
                enabled=True,
                max_bytes=10,
                bands=(PrioritySettings(priority=1, max_bytes=11, max_requests=10),),
            ),
        ),
        "flow_control.bands[0].max_bytes is above flow_control.max_bytes (10)",
    ),
    "models of unparsed bodies": (
        settings.Settings(
            pools=(
                pool_sections.PoolSection(name="a", match=pool_match.PoolMatch(models=("m",))),
                pool_sections.PoolSection(
                    name="b",
                    rewrites=(
                        pool_sections.RewriteEntry(
                            models=("m",), targets=(pool_sections.RewriteTarget(model="n"),)
                        ),
                    ),
                ),
            ),
            parse_bodies=False,
        ),
        "pools[0].match and pools[1].rewrites go by the model",
    ),
}


@pytest.mark.parametrize("name", ADVISED)
def test_advice(name):
    """A setting that is probably not meant draws exactly one sentence that names it."""
    advised, word = ADVISED[name]
    (warning,) = lint.find_warnings(advised)
    assert word in warning


def test_defaults_need_no_advice():
    """With endpoints given, the defaults have nothing to be warned of."""
    assert not list(lint.find_warnings(settings.Settings(pool=ENDPOINTS)))
