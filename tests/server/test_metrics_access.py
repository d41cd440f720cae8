"""Access to /metrics by tokens, with a fake reviewer, and over HTTP with a fake API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import pytest
from aiohttp import web

from extproc.cli import serve
from extproc.config import kubernetes_plan
from extproc.demo import stack
from extproc.discovery.kubernetes import settings
from extproc.errors import ConfigError
from extproc.server import app, metrics_access
from extproc.server.metrics_access import ReviewResult
from tests.e2e import http1
from tests.support.canary import CANARY
from tests.support.config_text import read

TOKEN = f"{CANARY}-scrape"
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TOKEN_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_PATH = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class FakeReviewer:
    """Reviewer that knows results by token, and waits for `go` if that is cleared."""

    def __init__(self, **results):
        self.results = results
        self.reviewed = []
        self.go = asyncio.Event()
        self.go.set()
        self.running = self.most_running = 0

    async def open(self):
        pass

    async def close(self):
        pass

    async def review(self, token):
        self.reviewed.append(token)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.go.wait()
        self.running -= 1
        return ReviewResult(self.results.get(token, 401))


class AccessFixture:
    """Access with a fake reviewer, in time that is set."""

    def __init__(self, **results):
        self.now = 1000.0
        self.reviewer = FakeReviewer(**results)
        self.access = metrics_access.MetricsAccess(self.reviewer, lambda: self.now)

    async def status(self, token):
        refused = await self.access.refusal(f"Bearer {token}")
        return 200 if refused is None else refused[0]


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic YTpi", "token", "Bearer a\tb", "Bearer é"]
)
async def test_a_scrape_without_a_token_needs_no_review(header):
    """Anything but a bearer token is refused at once."""
    fixture = AccessFixture()
    status, _ = await fixture.access.refusal(header)
    assert (status, fixture.reviewer.reviewed) == (401, [])


@pytest.mark.parametrize(
    ("result", "kept_s"),
    [(200, metrics_access.ALLOWED_S), (401, metrics_access.REFUSED_S), (403, 10.0)],
)
async def test_results_are_kept_for_their_time(result, kept_s):
    """An accepted token for a minute, a refused one shortly."""
    fixture = AccessFixture(a=result)
    for at, count in ((0.0, 1), (kept_s - 0.1, 1), (kept_s, 2)):
        fixture.now = 1000.0 + at
        assert await fixture.status("a") == result
        assert len(fixture.reviewer.reviewed) == count


async def test_a_failure_is_not_kept():
    """The next scrape asks again."""
    fixture = AccessFixture(a=503)
    assert await fixture.status("a") == 503
    fixture.reviewer.results["a"] = 200
    assert await fixture.status("a") == 200


async def test_the_scheme_is_read_in_any_case():
    """As HTTP has it."""
    fixture = AccessFixture(a=200)
    assert await fixture.access.refusal("bearer a") is None


@pytest.mark.parametrize("left", [0, 1])
async def test_scrapes_with_one_token_share_a_review(left):
    """Those that come during a review wait for it, whichever client leaves; so with a failure."""
    for result in (200, 503):
        fixture = AccessFixture(a=result)
        fixture.reviewer.go.clear()
        scrapes = [asyncio.ensure_future(fixture.status("a")) for _ in range(5)]
        await asyncio.sleep(0)
        scrapes[left].cancel()
        await asyncio.sleep(0)
        fixture.reviewer.go.set()
        results = await asyncio.gather(*scrapes, return_exceptions=True)
        assert isinstance(results.pop(left), asyncio.CancelledError)
        assert results == [result] * 4
        assert fixture.reviewer.reviewed == ["a"]


async def test_reviews_at_a_time_are_bounded():
    """A flood of made-up tokens does not become one of requests to the API server."""
    fixture = AccessFixture()
    fixture.reviewer.go.clear()
    scrapes = [asyncio.ensure_future(fixture.status(f"t{i}")) for i in range(50)]
    for _ in range(5):
        await asyncio.sleep(0)
    fixture.reviewer.go.set()
    assert await asyncio.gather(*scrapes) == [401] * 50
    assert fixture.reviewer.most_running == metrics_access.MAX_REVIEWS


async def test_made_up_tokens_displace_no_accepted_one():
    """Results are bounded, refused ones apart from the others."""
    fixture = AccessFixture(good=200)
    assert await fixture.status("good") == 200
    for i in range(metrics_access.MAX_RESULTS + 1):
        await fixture.status(f"t{i}")
    assert fixture.reviewer.reviewed.count("good") == 1
    assert await fixture.status("good") == 200
    assert await fixture.status(f"t{metrics_access.MAX_RESULTS}") == 401
    assert fixture.reviewer.reviewed.count("good") == 1
    assert await fixture.status("t0") == 401
    assert fixture.reviewer.reviewed.count("t0") == 2
    assert fixture.reviewer.reviewed.count(f"t{metrics_access.MAX_RESULTS}") == 1


async def test_a_review_that_does_not_end_is_given_up(monkeypatch, caplog):
    """Prometheus gets an answer before it gives up, and the log says why."""
    monkeypatch.setattr(metrics_access, "REVIEW_S", 0.0)
    fixture = AccessFixture(a=200)
    fixture.reviewer.go.clear()
    assert await fixture.status("a") == 503
    assert "no review of a token" in caplog.text


class ReviewApi:
    """API server that answers reviews."""

    def __init__(self, folder):
        self.folder = folder
        self.port = stack.free_port()
        self.requests = []
        self.own_token = "own"
        self.answers = {
            TOKEN_PATH: {
                "authenticated": True,
                "user": {"username": "u", "uid": "1", "groups": ["g"], "extra": {"k": ["v"]}},
            },
            ACCESS_PATH: {"allowed": True},
        }

    def write_kubeconfig(self):
        (self.folder / "token").write_text(self.own_token)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"tokenFile": str(self.folder / "token")}}],
        }
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)

    async def answer(self, request):
        body = await request.json()
        self.requests.append((request.path, body["spec"]))
        if request.headers["authorization"] != f"Bearer {self.own_token}":
            return web.json_response({"message": "who are you"}, status=401)
        answer = self.answers[request.path]
        if isinstance(answer, tuple):
            status, text = answer
            return web.Response(status=status, text=text)
        return web.json_response({**body, "status": answer}, status=201)

    @contextlib.asynccontextmanager
    async def serving(self):
        application = web.Application()
        application.router.add_post("/{path:.*}", self.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def reviewed(folder):
    """An API server, and a reviewer that asks it."""
    api = ReviewApi(folder)
    reaching = settings.KubernetesSettings(sources=(), kubeconfig=api.write_kubeconfig())
    reviewer = metrics_access.KubernetesReviewer(reaching)
    async with api.serving():
        await reviewer.open()
        try:
            yield api, reviewer
        finally:
            await reviewer.close()


async def test_reviews_name_the_token_and_then_its_user(tmp_path):
    """The user of the first answer is that of the second question, in every field."""
    async with reviewed(tmp_path) as (api, reviewer):
        assert (await reviewer.review(TOKEN)).status == 200
    path = {"path": "/metrics", "verb": "get"}
    user = {"user": "u", "uid": "1", "groups": ["g"], "extra": {"k": ["v"]}}
    assert api.requests == [
        (TOKEN_PATH, {"token": TOKEN}),
        (ACCESS_PATH, {"nonResourceAttributes": path, **user}),
    ]


def refuse(status):
    """An answer of the API server that quotes what was sent."""
    return status, json.dumps({"message": f"{status} as of {TOKEN}"})


@pytest.mark.parametrize(
    ("path", "answer", "status", "says"),
    [
        (TOKEN_PATH, {"authenticated": False, "error": "invalid"}, 401, ""),
        (TOKEN_PATH, {}, 401, ""),
        (ACCESS_PATH, {}, 403, ""),
        (ACCESS_PATH, {"allowed": False, "reason": "RBAC"}, 403, ""),
        (ACCESS_PATH, {"allowed": True, "denied": True}, 403, ""),
        (TOKEN_PATH, (201, "[]"), 503, "no TokenReview"),
        (ACCESS_PATH, (201, "no JSON"), 503, "no SubjectAccessReview"),
        (TOKEN_PATH, refuse(500), 503, "tokenreviews: 500"),
        (ACCESS_PATH, refuse(429), 503, "subjectaccessreviews: 429"),
    ],
)
async def test_answers_of_the_api_server_decide(tmp_path, caplog, path, answer, status, says):
    """Refusals are the client's, everything else is a failure, logged once, and without the token."""
    async with reviewed(tmp_path) as (api, reviewer):
        api.answers[path] = answer
        assert (await reviewer.review(TOKEN)).status == status
    assert says in caplog.text
    assert len(caplog.records) == bool(says)
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("path", "group", "resource"),
    [
        (TOKEN_PATH, "authentication.k8s.io", "tokenreviews"),
        (ACCESS_PATH, "authorization.k8s.io", "subjectaccessreviews"),
    ],
)
async def test_a_missing_right_is_logged_with_the_rule_that_grants_it(
    tmp_path, caplog, path, group, resource
):
    """Once, until reviews work again."""
    caplog.set_level(logging.INFO, "extproc.server")
    async with reviewed(tmp_path) as (api, reviewer):
        works = api.answers[path]
        api.answers[path] = (403, json.dumps({"message": "no right"}))
        for _ in range(2):
            assert (await reviewer.review(TOKEN)).status == 503
        (record,) = caplog.records
        assert f'apiGroups: ["{group}"], resources: ["{resource}"]' in record.getMessage()
        api.answers[path] = works
        assert (await reviewer.review(TOKEN)).status == 200
    assert "reviews tokens again" in caplog.text


async def test_an_api_server_that_is_away_is_a_failure(tmp_path, caplog):
    """The reason is in the log, not in the answer."""
    async with reviewed(tmp_path) as (api, reviewer):
        pass
    reviewer = metrics_access.KubernetesReviewer(
        settings.KubernetesSettings(sources=(), kubeconfig=api.write_kubeconfig())
    )
    assert (await reviewer.review(TOKEN)).status == 503
    await reviewer.open()
    result = await reviewer.review(TOKEN)
    await reviewer.close()
    assert result.status == 503
    assert str(api.port) not in result.reason
    assert "no answer" in caplog.text


async def test_rotated_credentials_are_loaded_for_the_same_review(tmp_path):
    """A scrape does not fail because the token of extproc itself expired."""
    async with reviewed(tmp_path) as (api, reviewer):
        assert (await reviewer.review(TOKEN)).status == 200
        api.own_token = "next"
        (tmp_path / "token").write_text("next")
        assert (await reviewer.review(TOKEN)).status == 200
        api.own_token = "unknown"
        assert (await reviewer.review(TOKEN)).status == 503


async def test_pages_of_a_picker_with_metrics_auth(tmp_path):
    """Only /metrics wants the token; that of the other pages opens it without a review."""
    (tmp_path / "admin").write_text("admin")
    api, port = ReviewApi(tmp_path), stack.free_port()
    picker = app.EndpointPickerProcess(
        read(
            f"server: {{host: 127.0.0.1, metrics_port: {port}, metrics_endpoint_auth: true, "
            f"admin_token_file: {tmp_path}/admin}}\n"
            f"cluster: {{kubeconfig: {api.write_kubeconfig()}}}\n"
        )
    )
    async with api.serving():
        await picker.start_admin()
        try:

            async def status(path, token=""):
                headers = [("authorization", f"Bearer {token}" if token else "")]
                answer = await http1.ask(port, path, headers=headers)
                is_refused = answer.status == 401
                assert answer.head.all("www-authenticate") == ["Bearer"] * is_refused
                return answer.status

            assert await status("/metrics") == 401
            assert await status("/metrics", "admin") == 200
            assert api.requests == []
            assert await status("/metrics", TOKEN) == 200
            assert len(api.requests) == 2
            assert [await status(path) for path in ("/healthz", "/readyz")] == [200, 503]
            assert await status("/debug/pools", TOKEN) == 401
            assert await status("/debug/pools", "admin") == 200
            api.answers[ACCESS_PATH] = {}
            for path in ("/metrics", "/%6detrics", "/metrics?name=a", f"http://a:{port}/metrics"):
                assert await status(path, "other") == 403
        finally:
            await picker.admin_server.close()


async def test_missing_credentials_end_the_start(tmp_path):
    """No page is served by a process that could review no token."""
    picker = app.EndpointPickerProcess(
        read(
            "server: {host: 127.0.0.1, metrics_port: 0, metrics_endpoint_auth: true}\n"
            f"cluster: {{kubeconfig: {tmp_path}/missing}}\n"
        )
    )
    with pytest.raises(ConfigError, match="no such file"):
        await picker.start_admin()
    await picker.admin_server.close()


def test_metrics_auth_without_kubernetes_is_refused():
    """With endpoints of a list; in a pod, or with a kubeconfig, there is an API server all the same."""
    wanted = read("server: {metrics_endpoint_auth: true}\npool: {endpoints: ['10.0.0.1:1']}\n")
    with pytest.raises(ConfigError, match=r"cluster\.kubeconfig"):
        kubernetes_plan.plan_metrics_auth(wanted, environment={})
    (problem,) = serve.find_problems(wanted)
    assert "--metrics-endpoint-auth" in str(problem)
    assert kubernetes_plan.plan_metrics_auth(wanted, environment=IN_A_POD) is not None
    off = read("server: {metrics_endpoint_auth: false}\n")
    assert kubernetes_plan.plan_metrics_auth(off, environment=IN_A_POD) is None


@pytest.mark.parametrize(
    ("server", "pool", "lines"),
    [
        ("", "{kubernetes: {inference_pool: p}}", 1),
        (", metrics_endpoint_auth: false", "{kubernetes: {inference_pool: p}}", 0),
        ("", "{endpoints: ['127.0.0.1:1']}", 0),
    ],
)
async def test_open_metrics_of_an_inference_pool_are_logged(caplog, server, pool, lines):
    """The picker of llm-d would guard them; a line is missing only if they are open on purpose."""
    caplog.set_level(logging.INFO, "extproc.server")
    picker = app.EndpointPickerProcess(
        read(f"server: {{host: 127.0.0.1, metrics_port: 0{server}}}\npool: {pool}\n")
    )
    await picker.start_admin()
    await picker.admin_server.close()
    texts = [record.getMessage() for record in caplog.records]
    assert sum("/metrics on port 0 is open" in text for text in texts) == lines
