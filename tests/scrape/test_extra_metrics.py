"""Extra metrics from an engine's page to a decision: `scrape.extra_metrics` and `Load.extra`."""

import asyncio
import json
import random

import pytest
from prometheus_client.core import GaugeMetricFamily

from extproc.cli import offline_explain
from extproc.config import factory
from extproc.endpoint import NO_EXTRA, Endpoint
from extproc.errors import ConfigError
from extproc.request import HttpRequest
from extproc.scrape import client, engines, metrics_page, scraper
from extproc.simulator import core, stats
from extproc.simulator.http import exposition
from extproc.telemetry import explanation, explanation_text, pool_state
from tests.simulator.builders import profile
from tests.support import config_text

RANKS = """\
vllm:num_requests_waiting 3
# TYPE gpu_watts gauge
gpu_watts{gpu="0"} 250.5
gpu_watts{gpu="1"} 100
# TYPE cache_info gauge
cache_info{size="7",tier="1"} 1
# TYPE offset gauge
offset -4
# TYPE broken gauge
broken NaN
# TYPE huge gauge
huge 1e300
"""


def read(page=RANKS, **selectors):
    extra = {name: engines.series(text) for name, text in selectors.items()}
    return metrics_page.read(page.encode(), 1.0, extra=extra).extra


def test_values_of_matching_samples_are_summed():
    """A selector with labels reads one sample, a selector without them the sum of all."""
    assert read(all="gpu_watts", first='gpu_watts{gpu="0"}', low="offset") == {
        "all": 350.5,
        "first": 250.5,
        "low": -4.0,
    }


def test_a_selector_reads_a_label():
    """A selector with brackets reads the number of a label."""
    assert read(tier="cache_info[tier]", size="cache_info{tier=1}[size]") == {
        "tier": 1.0,
        "size": 7.0,
    }


def test_metrics_that_are_absent_or_out_of_range_are_left_out():
    """A page without the metric, with NaN or with a huge value reports no value for it."""
    assert read(absent="nothing", nan="broken", huge="huge", other='gpu_watts{gpu="9"}') == {}


def test_extra_metrics_of_an_unknown_engine_are_read():
    """A page that no engine is recognized by still has its extra metrics."""
    assert read("# TYPE depth gauge\ndepth 5\n", depth="depth") == {"depth": 5.0}


def test_nothing_is_stored_without_configured_metrics():
    """Without extra metrics every load shares one empty mapping."""
    load = metrics_page.read(RANKS.encode(), 1.0)
    assert load.extra is NO_EXTRA


@pytest.mark.parametrize(
    ("text", "fixture"),
    [
        ("scrape: {extra_metrics: {depth: 'not a metric'}}", "scrape.extra_metrics.depth"),
        ("scrape: {extra_metrics: {'a b': metric}}", "scrape.extra_metrics"),
        (f"scrape: {{extra_metrics: {json.dumps({f'm{n}': 'm' for n in range(17)})}}}", "scrape"),
    ],
)
def test_selectors_names_and_their_number_are_checked(text, fixture):
    """A broken selector, an invalid name and more than 16 names are configuration errors."""
    with pytest.raises(ConfigError) as raised:
        config_text.read(text)
    assert fixture in str(raised.value)


PROFILE = """
scheduling:
  profile:
    scorers:
      - kind: endpoint-attribute-scorer
        params: {attributeKey: extra.depth, algorithm: {type: linear_lower_is_better}}
"""


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (PROFILE, "scrape.extra_metrics"),
        ("scrape: {extra_metrics: {dept: m}}" + PROFILE, "did you mean dept?"),
    ],
)
def test_a_plugin_reads_only_configured_metrics(text, fix):
    """A profile that names an extra metric that is not configured is refused."""
    with pytest.raises(ConfigError) as raised:
        factory.build(config_text.read(text))
    assert fix in str(raised.value)


class LoadedPage(exposition.ExpositionPage):
    """Page of a simulated engine with one more family."""

    depth = 0.0

    def collect(self):
        yield from super().collect()
        yield GaugeMetricFamily("engine_queue_depth", "Requests by tier.", value=self.depth)


def simulated_page(depth):
    machine = profile()
    counts = [stats.Stats(core.SimulatedEngine(machine))]
    page = LoadedPage(
        counts, exposition.HttpCounts(1e9), model="base", profile=machine, created=1e9
    )
    page.depth = depth
    return page.render()


CONFIG = "scrape: {models: false, extra_metrics: {depth: engine_queue_depth}}" + PROFILE


def test_an_extra_metric_of_simulated_engines_decides_and_is_shown(http):
    """The endpoint with the lowest value is picked; state and explanations show the values."""
    parts = factory.build(config_text.read(CONFIG))

    async def scrape():
        pages = [http.answer(simulated_page(depth)) for depth in (9.0, 2.0, 5.0)]
        servers = [http.ScriptedServer(page) for page in pages]
        async with (
            http.serving(servers[0]) as first,
            http.serving(servers[1]) as second,
            http.serving(servers[2]) as third,
        ):
            endpoints = [Endpoint(f"127.0.0.1:{s.port}") for s in (first, second, third)]
            parts.store.set_endpoints(endpoints, 0.0)
            fetch = client.ScrapeClient(timeout_s=60.0, cap_bytes=1_000_000)
            loop = scraper.Scraper(
                parts.scraping,
                parts.store,
                client=fetch,
                clock=lambda: 1.0,
                rng=random.Random(1),
            )
            for member in parts.store.pool.members:
                await scraper.EndpointScraper(loop, (member,), member.endpoint.port).step()
            fetch.close()
            return [endpoint.address for endpoint in endpoints]

    addresses = asyncio.run(scrape())
    body = b'{"model": "base", "messages": [{"role": "user", "content": "x"}]}'
    request = HttpRequest({":method": "POST", ":path": "/v1/chat/completions"}, body)
    decision = parts.director.route(request, 1.5)
    assert decision.endpoints[0].address == addresses[1]

    state = pool_state.describe_pool_state(parts.store.pool, 1.5)
    assert [endpoint.extra for endpoint in state.endpoints] == [
        {"depth": 9.0},
        {"depth": 2.0},
        {"depth": 5.0},
    ]
    shown = explanation.explain(decision)
    assert [candidate["extra"] for candidate in shown["candidates"]] == [
        {"depth": 9.0},
        {"depth": 2.0},
        {"depth": 5.0},
    ]
    assert "depth=9" in explanation_text.render_table(shown)
    again = offline_explain.route_offline(config_text.read(CONFIG), state, request, where="x")
    assert again.endpoints[0].address == addresses[1]
