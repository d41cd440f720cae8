"""Errors that Envoy answers itself when extproc or an engine is down, as clients read them."""

from __future__ import annotations

import json
import re
import signal

import pytest
import yaml

from extproc.demo import stack
from tests.e2e import backend, http1, installation

PATH = "/v1/messages"
CHAT = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hello"}]}).encode()
#: Code and type of what a picker that is down comes to.
_NO_PICKER = (500, "endpoint_picker_unavailable")
FILES = sorted(path.name for path in installation.SHIPPED.glob("original-dst*.yaml"))
OVERRIDE_FILES = sorted(path.name for path in installation.SHIPPED.glob("override-host*.yaml"))


async def refused(fixture, body=CHAT):
    """The status and the error object of an answer."""
    answer = await http1.ask(fixture.port, PATH, body)
    assert answer.head.get("content-type") == "application/json"
    return answer.status, read_error(answer.json())


def read_error(body):
    """The error object of a body, as clients of OpenAI and of Anthropic find it."""
    error = body["error"]
    assert set(error) == {"message", "type", "code"}
    assert body["type"] == "error"
    return error


@pytest.mark.parametrize("template", installation.first_and_slow(FILES))
async def test_errors_of_envoy_are_json_with_a_hint(template):
    """A dead engine differs from a dead picker, and refusals of extproc stay as they are."""
    dead = f"127.0.0.1:{stack.free_port()}"
    async with installation.installed(dead, template=template) as fixture:
        status, error = await refused(fixture)
        assert (status, error["code"], error["type"]) == (503, 503, "model_server_unavailable")
        assert error["message"] == (
            "the model server does not answer; the access log of the gateway says which one and why, "
            "by the request id"
        )
        line = await fixture.access(status=503)
        assert line["picked"] == dead
        assert "connection" in line["details"]
        status, error = await refused(fixture, b"{")
        assert status == 400
        assert error["message"].startswith("inference error: BadRequest")
        await fixture.settled()
        await fixture.extproc.stop(signal.SIGKILL)
        status, error = await refused(fixture)
        # The buffered profile goes on without a pick, and has nowhere to go then.
        wanted = (503, "no_endpoint") if "buffered" in template else _NO_PICKER
        assert (error["code"], error["type"]) == wanted
        assert status == error["code"]
        await fixture.start_extproc()


@pytest.mark.parametrize("template", installation.first_and_slow(OVERRIDE_FILES))
async def test_errors_of_envoy_are_json_when_all_fallbacks_are_dead(template):
    """The same if extproc names dead engines and if Envoy chooses them."""
    dead = [f"127.0.0.1:{stack.free_port()}" for _ in range(2)]
    arguments = ["--config-text", installation.UNSCRAPED, "--fallback-endpoints", "1"]
    xds_port = stack.free_port()
    if stack.asks_for_xds(installation.SHIPPED / template):
        arguments += ["--xds", "--xds-port", str(xds_port)]

    async with installation.installed(
        *dead,
        template=template,
        plaintext=False,
        arguments=arguments,
        change=installation.name_xds_server(xds_port),
    ) as fixture:
        await fixture.until_stats(
            lambda stats: stats.get("cluster.engines.membership_total") == len(dead)
        )
        answers = [await refused(fixture)]
        await fixture.settled()
        await fixture.extproc.stop(signal.SIGKILL)
        answers.append(await refused(fixture))
        line = await fixture.access(status=503)
        assert set(line) >= {"id", "flags", "details", "total_ms"}
        for status, error in answers:
            assert (status, error["code"], error["type"]) == (503, 503, "model_server_unavailable")
            assert "access log" in error["message"]
        await fixture.start_extproc()


async def test_limits_of_envoy_are_json_with_their_name():
    """Bodies that are too large, timeouts, and upgrades that are not configured."""

    def tighten(config):
        manager = installation.manager(config)
        manager["request_headers_timeout"] = manager["request_timeout"] = "0.2s"
        manager["stream_idle_timeout"] = "2s"
        (listener,) = config["static_resources"]["listeners"]
        listener["per_connection_buffer_limit_bytes"] = 1024

    async def wait_for_client(_request, peer):
        await peer.gone()

    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
    requests = {
        (413, "request_payload_too_large"): head + b"content-length: 2048\r\n\r\n" + bytes(2048),
        (408, "request_header_timeout"): head,
        (408, "request_overall_timeout"): head + b"content-length: 100\r\n\r\n{",
        (504, "stream_idle_timeout"): b"GET /hang HTTP/1.1\r\nhost: a\r\n\r\n",
        (403, "upgrade_failed"): b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\n"
        b"upgrade: websocket\r\n\r\n",
    }
    async with backend.backend() as engine:
        engine.plays["/hang"] = wait_for_client
        async with installation.installed(
            engine.address, template="original-dst-buffered.yaml", change=tighten
        ) as fixture:
            for (status, details), data in requests.items():
                async with http1.calling(fixture.port) as call:
                    await call.send(data)
                    answer = await call.answer()
                error = read_error(answer.json())
                assert (answer.status, error["code"]) == (status, status)
                assert error["type"] == "request_ended_by_envoy"
                assert details in error["message"]


async def test_the_cors_filter_of_the_guide_covers_refusals():
    """Preflights, refusals of extproc and errors of Envoy have the headers that a page needs."""
    page = installation.SHIPPED.parent / "docs/guides/choose-an-envoy-profile.md"
    (text,) = re.findall(r"```yaml\n(http_filters:.*?)```", page.read_text(), re.DOTALL)
    guide = yaml.safe_load(text)

    def allow_pages(config):
        manager = installation.manager(config)
        manager["http_filters"][:0] = guide["http_filters"]
        (host,) = manager["route_config"]["virtual_hosts"]
        host.update(guide["virtual_hosts"][0])

    dead = f"127.0.0.1:{stack.free_port()}"
    origin = ("origin", "https://app.example")
    async with installation.installed(dead, change=allow_pages) as fixture:
        for body, status in ((b"{", 400), (CHAT, 503)):
            answer = await http1.ask(fixture.port, PATH, body, headers=[origin])
            assert answer.status == status
            assert answer.head.get("access-control-allow-origin") == origin[1]
            assert answer.head.get("access-control-expose-headers") == "retry-after, x-request-id"
        headers = [origin, ("access-control-request-method", "POST")]
        answer = await http1.ask(fixture.port, PATH, method="OPTIONS", headers=headers)
        assert answer.status == 200
        assert answer.head.get("access-control-allow-headers") == "authorization, content-type"
