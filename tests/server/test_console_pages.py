"""Routes of the console: its files, their headers, and the data behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import types
import urllib.parse

import msgspec
import pytest

from extproc.config.pool_sections import PoolSection
from extproc.config.settings import PeerSyncSection
from extproc.decision import NO_ENDPOINTS
from extproc.pool.snapshot import Pool
from extproc.request import HttpRequest, RequestLabels
from extproc.server import console
from extproc.server.reload import ReloadResult
from extproc.telemetry.control_plane_metrics import ScalingMetrics
from extproc.telemetry.decision_log import RejectionRecord
from tests.e2e import http1
from tests.support import serving

ENDPOINTS = ("127.0.0.1:81", "127.0.0.2:81")


@contextlib.asynccontextmanager
async def picker(clock=time.monotonic):
    """A running picker and the port of its pages."""
    async with serving.running(serving.settings(*ENDPOINTS), clock=clock) as running:
        await running.sync()
        yield running.picker, running.ports.pages


def route(picker, request_id):
    """Let a request be routed and recorded."""
    now = time.monotonic()
    raw = HttpRequest(
        {":method": "POST", ":path": "/v1/completions"},
        json.dumps({"model": "demo", "prompt": "SECRET PROMPT " * 50}).encode(),
    )
    decision = picker.pool_registry.pool_selector.route(raw, now).outcome
    recorder = picker.servicer.shared.observer.observe_request("")
    labels = RequestLabels("demo", "demo", "none", 0)
    recorder.on_routed(
        decision, request_id=request_id, labels=labels, trace_id="", now=now, duration_s=0.001
    )
    return recorder


async def test_every_file_of_the_page_is_served():
    """The page, its scripts and styles, each with a strict policy and a validator."""
    async with picker() as (_, port):
        for name, file in console.read_files().items():
            path = "/console/" if name == "index.html" else f"/console/{name}"
            answer = await http1.ask(port, path)
            assert (answer.status, answer.body) == (200, file.body)
            policy = answer.head.get("content-security-policy")
            assert policy.startswith("default-src 'self'; ")
            assert "unsafe" not in policy
            assert answer.head.get("x-content-type-options") == "nosniff"
            again = await http1.ask(port, path, headers=[("if-none-match", file.etag)])
            assert (again.status, again.body) == (304, b"")


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere():
    """No script, style or handler within the page, and no address of another host."""
    page = console.read_files()["index.html"].body.decode()
    assert "<style" not in page
    assert " style=" not in page
    assert not re.search(r"\son\w+=", page)
    assert "<script>" not in page
    for name, file in console.read_files().items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, name
        assert "innerHTML" not in text
        assert "eval(" not in text


async def test_other_names_are_not_files():
    """There is no way out of the folder."""
    async with picker() as (_, port):
        for path in ("/console/none.js", "/console/..%2fadmin.py", "/console/__init__.py"):
            assert (await http1.ask(port, path)).status == 404
        for path in ("/", "/console"):
            moved = await http1.ask(port, path)
            assert (moved.status, moved.head.get("location")) == (308, "console/")


async def test_overview_has_endpoints_traffic_and_problems():
    """It shows each endpoint, and names a refused configuration."""
    async with picker() as (process, port):
        process.reloads.add(ReloadResult(error="f.yaml: expected a number"))
        overview = (await http1.ask(port, "/debug/overview")).json()
        (pool,) = overview["pools"]
        assert [item["state"]["address"] for item in pool["endpoints"]] == list(ENDPOINTS)
        assert overview["is_ready"]
        (problem,) = overview["problems"]
        assert problem["kind"] == "configuration-refused"
        assert problem["advice"] == "f.yaml: expected a number"


async def test_overview_counts_a_request_in_stages_once():
    """Each of its endpoints has it in flight, and the pool has one request."""
    async with picker() as (process, port):
        members = process.pool_registry.by_name[""].parts.store.pool.members
        for member, stage in zip(members, ("decode", "prefill"), strict=True):
            member.account.open("demo", 10, cached_tokens=0, now=0.0, stage=stage)
        (pool,) = (await http1.ask(port, "/debug/overview")).json()["pools"]
        assert [item["state"]["in_flight"] for item in pool["endpoints"]] == [1, 1]
        assert pool["in_flight"] == 1


async def test_a_pool_that_is_scaled_to_zero_is_a_note():
    """Of all pools without endpoints, it is the one that autoscaling wants empty."""
    async with picker() as (subject, _):
        (view,) = subject.pool_registry.views().values()
        empty = msgspec.structs.replace(view, pool=Pool((), {}))
        metrics = {"idle": ScalingMetrics({"desired_replicas": 0.0}), "new": ScalingMetrics()}
        pages = build_pages(
            subject, lambda: dict.fromkeys(("idle", "new", "other"), empty), lambda: metrics
        )
        answer = await pages.overview(types.SimpleNamespace(query={}))
        assert [
            (problem["severity"], problem["pool"])
            for problem in json.loads(answer.body)["problems"]
        ] == [("critical", "new"), ("critical", "other"), ("info", "idle")]


async def test_overview_is_made_once_for_many_tabs():
    """Within a second all get the same bytes."""
    async with picker(lambda: 1.0) as (_, port):
        first = await http1.ask(port, "/debug/overview")
        assert (await http1.ask(port, "/debug/overview")).body == first.body


def build_pages(subject, views, scaling=dict):
    """The pages of a picker at a fixed time."""
    return console.ConsolePages(
        counters=subject.counters,
        views=views,
        history=subject.history,
        decisions=subject.decisions,
        reloads=subject.reloads,
        readiness=subject.readiness,
        recording_error=str,
        scaling=scaling,
        about=dict,
        clock=lambda: 1.0,
    )


async def test_other_work_has_its_turn_between_many_pools():
    """However few endpoints each of them has."""
    async with picker() as (subject, _):
        (view,) = subject.pool_registry.views().values()
        views = {f"pool-{number}": view for number in range(100)}
        pages, turns = build_pages(subject, lambda: views), 0
        async with asyncio.TaskGroup() as tasks:
            request = types.SimpleNamespace(query={})
            answer = tasks.create_task(pages.overview(request))
            while not answer.done():
                await asyncio.sleep(0)
                turns += 1
        assert len(json.loads(answer.result().body)["pools"]) == len(views)
        assert turns >= len(views)


async def test_tabs_that_ask_at_once_share_an_overview():
    """A large pool is described piece by piece; who asks meanwhile waits for the same."""
    looks = []
    endpoints = [f"127.0.1.{number}:81" for number in range(200)]
    async with serving.running(serving.settings(*endpoints)) as running:
        await running.sync()
        subject = running.picker

        def views():
            looks.append(1)
            return subject.pool_registry.views()

        pages = build_pages(subject, views)
        request = types.SimpleNamespace(query={})
        answers = await asyncio.gather(*(pages.overview(request) for _ in range(5)))
        assert len({answer.body for answer in answers}) == 1
    assert len(looks) == 1


@contextlib.asynccontextmanager
async def running_two_pools():
    """A picker with the pools `a` and `b`, of an endpoint each."""
    pools = tuple(
        PoolSection(name=name, endpoints=(endpoint,))
        for name, endpoint in zip("ab", ENDPOINTS, strict=True)
    )
    settings = msgspec.structs.replace(serving.settings(), pools=pools)
    async with serving.running(settings) as running:
        await running.picker.sync()
        yield running


async def test_overview_has_the_traffic_of_a_pool():
    """Of one pool, or of all together."""
    async with running_two_pools() as running:
        process, port = running.picker, running.ports.pages
        for at in (0.0, 5.0):
            process.history.sample(process.counters, process.pool_registry.views(), at)
        for query in ("", "?pool=", "?pool=a"):
            overview = (await http1.ask(port, f"/debug/overview{query}")).json()
            assert len(overview["traffic"]) == 1
            assert [pool["name"] for pool in overview["pools"]] == ["a", "b"]


@pytest.mark.parametrize("page", ["pool", "overview", "decisions"])
async def test_a_pool_that_does_not_exist_is_refused(page):
    """404 with the names of the pools that exist."""
    async with running_two_pools() as running:
        answer = await http1.ask(running.ports.pages, f"/debug/{page}?pool=c")
        assert answer.status == 404
        message = answer.json()["error"]["message"]
        assert message.endswith("no pool is called 'c'; there are: 'a', 'b'")


async def test_configuration_hides_passwords_and_commands():
    """A value that may hold a secret is not shown, neither in force nor in the history."""
    secret = PeerSyncSection(url="redis://:SECRET@127.0.0.1:1/0")
    settings = serving.settings(*ENDPOINTS)
    async with serving.running(settings, peer_sync=secret) as running:
        await running.sync()
        answer = await http1.ask(running.ports.pages, "/debug/configuration")
        assert b"SECRET" not in answer.body
        paths = [setting["path"] for setting in answer.json()["settings"]]
        assert "peer_sync.url" in paths
        assert "scheduling.strategy" in paths


async def test_no_page_of_the_console_has_a_prompt():
    """Decisions are described without the text of requests."""
    async with picker() as (process, port):
        route(process, "id-1").on_finished(endpoint=ENDPOINTS[0], status="200", duration_s=1.0)
        for path in (
            *("/debug/overview", "/debug/configuration", "/debug/strategies"),
            *("/debug/decisions", "/debug/decisions/id-1"),
        ):
            answer = await http1.ask(port, path)
            assert answer.status == 200
            assert b"SECRET" not in answer.body


async def test_strategies_are_compared_on_the_last_requests():
    """The choices as they were routed are the first, and agree with themselves."""
    async with picker() as (process, port):
        for number in range(5):
            route(process, f"id-{number}")
        compared = (await http1.ask(port, "/debug/strategies")).json()
        assert compared["num_requests"] == 5
        first = compared["strategies"][0]
        assert (first["name"], first["agreement_ratio"]) == ("least-request", 1.0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {"a-1", "b-2", "c-3", "dü-4"}),
        ("id=a-", {"a-1"}),
        ("id=A-", {"a-1"}),
        ("id=%C3%BC-", {"dü-4"}),
        ("result=open", {"a-1"}),
        ("result=ok", {"b-2"}),
        ("result=failed", {"c-3"}),
        ("result=refused", {"dü-4"}),
        ("endpoint=127.0.0", {"a-1", "b-2", "c-3"}),
        ("model=demo&result=ok", {"b-2"}),
        ("model=other", set()),
        ("limit=1", {"dü-4"}),
        ("slower_than=0", {"a-1", "b-2", "c-3", "dü-4"}),
        ("slower_than=1.5", {"c-3"}),
    ],
)
async def test_decisions_are_selected(query, expected):
    """By parts of names, and by result."""
    async with picker() as (process, port):
        route(process, "a-1")
        route(process, "b-2").on_finished(endpoint=None, status="200", duration_s=1.0)
        route(process, "c-3").on_finished(endpoint=None, status="503", duration_s=2.0)
        refusal = RejectionRecord(
            "dü-4".encode().decode("latin-1"), time.monotonic(), "", "", NO_ENDPOINTS
        )
        process.decisions.add_rejection(refusal)
        answer = await http1.ask(port, f"/debug/decisions?{query}")
        assert {decision["id"] for decision in answer.json()["decisions"]} == expected


async def test_decisions_of_a_pool_are_not_those_of_longer_names():
    """The whole name counts, also of a pool that is gone by now."""
    async with picker() as (process, port):
        pools = {"chat", "chat-large", "Chat"}
        for pool in pools:
            process.decisions.add_rejection(RejectionRecord(pool, 1.0, pool, "", NO_ENDPOINTS))
        assert (await http1.ask(port, "/debug/decisions?pool=cha")).status == 404
        for query, expected in (("chat", {"chat"}), ("", pools)):
            answer = await http1.ask(port, f"/debug/decisions?pool={query}")
            assert {decision["id"] for decision in answer.json()["decisions"]} == expected


@pytest.mark.parametrize("request_id", ["..", ".", "a/b", "", "%2E", "a&result=ok"])
async def test_a_decision_is_found_by_any_id(request_id):
    """The query takes ids that a path cannot have everywhere."""
    async with picker() as (process, port):
        route(process, request_id)
        query = urllib.parse.urlencode({"id": request_id})
        decision = await http1.ask(port, f"/debug/decision?{query}")
        assert decision.json()["id"] == request_id
        assert (await http1.ask(port, f"/debug/decision?{query}&result=ok")).status == 404
        assert (await http1.ask(port, f"/debug/decision?{query}&result=no")).status == 400
        (row,) = (await http1.ask(port, "/debug/decisions")).json()["decisions"]
        part = f"sequence={row['sequence']}"
        for page in (part, f"{query}&{part}"):
            decision = await http1.ask(port, f"/debug/decision?{page}")
            assert decision.json()["id"] == request_id
        assert (await http1.ask(port, f"/debug/decision?{query}&sequence=9")).status == 404
        assert (await http1.ask(port, f"/debug/decision?{query}&sequence=x")).status == 400


async def test_a_decision_without_an_id_is_refused():
    """400 with the parameter that is missing; an id may be empty."""
    async with picker() as (_, port):
        for query, status in (("", 400), ("?result=ok", 400), ("?id=", 404)):
            assert (await http1.ask(port, f"/debug/decision{query}")).status == status


@pytest.mark.parametrize(
    "query",
    ["result=lost", "limit=x", "limit=-1", "limit=", "slower_than=x", "slower_than=nan", "slow=1"],
)
async def test_a_wrong_selection_of_decisions_is_refused(query):
    """400 with the values that are expected."""
    async with picker() as (_, port):
        answer = await http1.ask(port, f"/debug/decisions?{query}")
        assert answer.status == 400
        assert f"?{query.partition('=')[0]}=" in answer.body.decode()


async def test_a_decision_has_the_predicted_and_the_actual_first_token():
    """The result of the request is beside its prediction."""
    async with picker() as (process, port):
        recorder = route(process, "id-1")
        recorder.on_response_headers(
            0.25, elapsed_s=0.3, status="200", is_stream=False, is_shown=True
        )
        recorder.on_finished(endpoint=ENDPOINTS[0], status="200", duration_s=1.0)
        decision = (await http1.ask(port, "/debug/decisions/id-1")).json()
        assert decision["first_token_s"] == decision["headers_s"] == pytest.approx(0.25)
        assert decision["predicted_first_token_s"] is None
        assert decision["result"] == "ok"


@pytest.mark.parametrize("is_shown", [True, False])
async def test_the_first_token_of_a_stream_is_that_of_its_first_chunk(is_shown):
    """Engines send headers before it, so headers alone do not tell it."""
    async with picker() as (process, port):
        recorder = route(process, "id-1")
        recorder.on_response_headers(
            0.01, elapsed_s=0.02, status="200", is_stream=True, is_shown=is_shown
        )
        if is_shown:
            recorder.on_response_chunk(0.52)
        recorder.on_finished(endpoint=ENDPOINTS[0], status="200", duration_s=1.0)
        decision = (await http1.ask(port, "/debug/decisions/id-1")).json()
        assert decision["headers_s"] == pytest.approx(0.01)
        assert decision["first_token_s"] == (pytest.approx(0.51) if is_shown else None)
