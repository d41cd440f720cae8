from __future__ import annotations

import json
from email.utils import formatdate
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import finding
from extproc.config.settings import ScrapeSection, Settings
from extproc.diagnostics import engine_diagnosis
from extproc.diagnostics.pages import NO_PAGE, EnginePages
from extproc.endpoint import Endpoint
from extproc.errors import TOO_MANY_FILES
from extproc.scrape.client import FetchedPage
from tests.support.canary import CANARY

#: A page of a real vLLM.
VLLM = (Path(__file__).parents[1] / "data" / "vllm-0.32-idle.txt").read_bytes()
SGLANG = b"""\
sglang:num_running_reqs{model_name="m"} 1
sglang:num_queue_reqs{model_name="m"} 0
sglang:token_usage{model_name="m"} 0.1
sglang:num_pages{model_name="m"} 100
sglang:page_size{model_name="m"} 16
sglang:prompt_tokens_total{model_name="m"} 10
sglang:cached_tokens_total{model_name="m"} 5
"""
NOW = 1_795_000_000.0
FAILED_404 = FetchedPage(failure="status 404")


def page(value):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return FetchedPage(body, date=formatdate(NOW, usegmt=True))


def models(*names, length=4096):
    cards = [{"id": name, "max_model_len": length} for name in names]
    return page({"object": "list", "data": cards})


def engine(address="10.0.0.1:8000", **fields):
    """Pages of a vLLM that is as it should be."""
    usual = {
        "metrics": page(VLLM),
        "metrics_s": 0.01,
        "received_at": NOW,
        "health": page(b""),
        "models": models("m"),
        "version": page({"version": "0.32.0"}),
        "server_info": NO_PAGE,
        "kv_events": page([{"endpoint": "tcp://*:5557"}]),
    }
    return EnginePages(pool="", endpoint=Endpoint(address), **usual | fields)


def sglang(**flags):
    info = {"version": "0.5.11", "api_key": CANARY, "kv_events_config": "{}", **flags}
    return engine(
        metrics=page(SGLANG), version=FAILED_404, kv_events=NO_PAGE, server_info=page(info)
    )


def findings(*engines, settings=None):
    return [
        result
        for result in diagnose(*engines, settings=settings or Settings())
        if result.severity != "fine"
    ]


def diagnose(*engines, settings):
    examined = [engine_diagnosis.examine(pages, settings) for pages in engines]
    return list(engine_diagnosis.compare(examined, settings))


@pytest.mark.parametrize("pages", [engine(), sglang()], ids=["vllm", "sglang"])
def test_an_engine_in_order_has_no_findings(pages):
    """Real pages, and flags as extproc wants them."""
    assert findings(pages) == []


NO_CACHING = VLLM.replace(b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')
BLOCKS_64 = VLLM.replace(b',block_size="32"', b',block_size="64"')
ALONE = {
    "refused": (
        engine(metrics=FetchedPage(failure="refused")),
        ("error", "engine_reachable", "correct the port"),
    ),
    "files": (
        engine(metrics=FetchedPage(failure=TOO_MANY_FILES)),
        ("error", "engine_reachable", "ulimit -n"),
    ),
    "hangs": (
        engine(metrics=FetchedPage(failure="timeout")),
        ("error", "engine_reachable", "NetworkPolicies"),
    ),
    "tls": (
        engine(metrics=FetchedPage(failure="tls")),
        ("error", "engine_reachable", "scrape: {scheme: http}"),
    ),
    "unhealthy": (
        engine(health=FetchedPage(failure="status 503")),
        ("error", "engine_health", "see the log"),
    ),
    "no metrics": (
        engine(metrics=FAILED_404, server_info=FAILED_404),
        ("error", "metrics_page", "scrape: {path: PATH}"),
    ),
    "sglang without metrics": (
        engine(metrics=FAILED_404, server_info=page({"version": "0.5.11"})),
        ("error", "metrics_page", "--enable-metrics"),
    ),
    "no Prometheus text": (
        engine(metrics=page(b"<html>hello</html>")),
        ("error", "metrics_page", "scrape: {path: PATH}"),
    ),
    "another exporter": (
        engine(metrics=page(b"node_load1 0.5\n")),
        ("error", "engine_known", "metrics-port"),
    ),
    "too large": (
        engine(metrics=FetchedPage(failure="too large")),
        ("error", "metrics_bytes", "max_page_bytes: 16777216"),
    ),
    "without statistics": (
        engine(metrics=page(b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\n")),
        ("warning", "metrics_missing", "--disable-log-stats"),
    ),
    "slow page": (
        engine(metrics_s=0.7),
        ("warning", "metrics_time", "timeout_s: 4"),
    ),
    "page after the time limit": (
        engine(metrics_s=1.7),
        ("error", "metrics_time", "timeout_s: 4"),
    ),
    "no prefix caching": (
        engine(metrics=page(NO_CACHING)),
        ("warning", "prefix_caching", "--enable-prefix-caching"),
    ),
    "sglang without radix cache": (
        sglang(disable_radix_cache=True),
        ("warning", "prefix_caching", "--disable-radix-cache"),
    ),
    "no KV events": (
        engine(kv_events=page([])),
        ("note", "kv_events", "enable_kv_cache_events"),
    ),
    "sglang without KV events": (
        sglang(kv_events_config=None),
        ("note", "kv_events", '--kv-events-config \'{"publisher"'),
    ),
    "locked models": (
        engine(models=FetchedPage(failure="status 401")),
        ("warning", "models_page", "--api-key"),
    ),
    "no models": (
        engine(models=page(b"{}")),
        ("warning", "models_page", "scrape: {models: false}"),
    ),
    "clock ahead": (
        engine(received_at=NOW - 60),
        ("warning", "clock", "chrony"),
    ),
    "clock behind": (
        engine(received_at=NOW + 60),
        ("warning", "clock", "chrony"),
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_fault_of_an_engine_is_a_finding(name):
    """Severity, check and a fix that names the flag or the field; nothing else is reported."""
    pages, (severity, check, fix) = ALONE[name]
    (result,) = findings(pages)
    assert (result.severity, result.check) == (severity, check)
    assert fix in result.fix
    assert result.got
    assert result.wanted
    assert result.place == "engine 10.0.0.1:8000"


TOGETHER = {
    "versions": ({"version": page({"version": "0.31.0"})}, "note", "versions_differ"),
    "blocks": ({"metrics": page(BLOCKS_64)}, "warning", "block_sizes_differ"),
    "models": ({"models": models("other")}, "note", "models_differ"),
    "lengths": ({"models": models("m", length=8192)}, "warning", "model_lengths_differ"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_difference_within_a_pool_is_a_finding(name):
    """Of the pool, with how many engines have which value; engines of other pools may differ."""
    fields, severity, check = TOGETHER[name]
    other = engine("10.0.0.2:8000", **fields)
    (result,) = findings(engine(), other, engine("10.0.0.3:8000"))
    assert (result.severity, result.check, result.place) == (severity, check, "pool")
    assert "(2); " in result.got
    assert findings(engine(), msgspec.structs.replace(other, pool="b")) == []


def test_prefix_caching_of_a_part_of_a_pool_is_two_findings():
    """The engine without it, and that the pool is mixed."""
    other = engine("10.0.0.2:8000", metrics=page(NO_CACHING))
    assert [result.check for result in findings(engine(), other)] == [
        "prefix_caching",
        "prefix_caching_differs",
    ]


def test_different_models_are_an_error_where_models_are_not_read():
    """Requests would go to engines that do not serve their model."""
    settings = Settings(scrape=ScrapeSection(models=False))
    other = engine("10.0.0.2:8000", models=models("other"))
    (result,) = findings(engine(), other, settings=settings)
    assert (result.severity, result.check) == ("error", "models_differ")


def test_secrets_of_an_engine_are_not_printed():
    """SGLang shows its API key among its flags."""
    results = diagnose(sglang(disable_radix_cache=True), settings=Settings())
    assert results
    assert CANARY not in str([result.to_json() for result in results])


BYTES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([b"[" * 100_000, b'{"data": [{"id": 5}]}', b'{"server_args": 3}', VLLM[:5000]]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["data", "id", "version", "server_args", "kv_events_config"]),
                inner,
                max_size=3,
            ),
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(bodies=st.lists(BYTES, min_size=6, max_size=6), date=st.text(max_size=40))
def test_any_bytes_are_judged(bodies, date):
    """Engines are not trusted: no page makes the diagnosis fail, and none reaches a terminal raw."""
    names = ("metrics", "health", "models", "version", "server_info", "kv_events")
    pages = {name: FetchedPage(body, date=date) for name, body in zip(names, bodies, strict=True)}
    for result in diagnose(engine(**pages), settings=Settings()):
        assert all(text.isprintable() for text in result.to_json().values())


def test_merged_findings_name_some_places():
    """A fleet with the same mistake has a single finding, the worst come first."""
    pages = [engine(f"10.0.0.{n}:8000", metrics=page(NO_CACHING)) for n in range(1, 6)]
    pages.append(engine("10.0.0.9:8000", metrics=FetchedPage(failure="refused")))
    merged = list(finding.merge_places(findings(*pages)))
    assert [result.check for result in merged] == ["engine_reachable", "prefix_caching"]
    assert merged[1].place == (
        "engine 10.0.0.1:8000, engine 10.0.0.2:8000, engine 10.0.0.3:8000 and 2 more"
    )


def test_text_of_others_is_cut_and_printable():
    """No escape sequence, no line break, no end."""
    assert finding.clean("a\x1b[31mb\nc") == "a [31mb c"
    assert len(finding.clean("x" * 10_000)) == 403
