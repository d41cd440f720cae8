from __future__ import annotations

import json

import pytest

from extproc import decision
from extproc.decision import Rejection
from extproc.protocol import messages
from extproc.scheduling.pickers import RandomPicker
from extproc.scheduling.profile import SchedulerProfile
from tests.support import ext_proc_script, peer
from tests.support.peer import DecodedReply
from tests.support.pool_fixture import PoolFixture

CHAT = "/v1/chat/completions"
NO_ENDPOINTS = ext_proc_script.refuse(
    503,
    message="inference error: ServiceUnavailable - "
    "failed to find endpoint candidates for serving the request",
    kind="server_error",
    reason="rejected-no-endpoints",
    retry_after="1",
)


class RejectAll:
    """A filter that keeps no candidate."""

    kind = "nobody"
    needs = frozenset()

    def filter(self, turn, candidates):
        return []


def post(path: str, body: bytes, house: PoolFixture, **settings: object) -> DecodedReply:
    """The first answer to a POST."""
    queued = ext_proc_script.Talk(house.decide, **settings)
    queued.hear(ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": path}))
    replies = queued.hear(ext_proc_script.request_body(body, ends=True))
    queued.exchange.close()
    assert queued.budget.held_bytes == 0
    return replies[0]


def some() -> PoolFixture:
    return PoolFixture({ext_proc_script.ADDRESS: None})


def message_of(reply: DecodedReply) -> str:
    assert reply.part == "immediate_response"
    assert reply.headers["content-type"] == "application/json"
    error = reply.error["error"]
    assert set(error) == {"message", "type", "code"}
    assert error["code"] == reply.status
    return str(error["message"])


def test_067_no_endpoint_ready_with_body():
    """A POST while the pool is empty: 503 with reason and retry-after."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    assert post(CHAT, body, PoolFixture({})) == NO_ENDPOINTS


@pytest.mark.parametrize("mode", ["DUPLEX", "BUFFERED", "STREAMED", "NONE"])
def test_068_no_endpoint_ready_without_body(mode: str):
    """A GET while the pool is empty: 503, as the protocol says (the reference answers 500)."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({":method": "GET", ":path": "/"}, ends=True),
            NO_ENDPOINTS,
        ],
        PoolFixture({}).decide,
        modes=(mode, "NONE"),
    )


@pytest.mark.parametrize("body", [b"no healthy upstream", b"{", b"[1]", b'"a"', b"\xff{}"])
def test_069_broken_json(body: bytes):
    """A body that is no JSON object on an OpenAI path: 400 in the upstream vocabulary."""
    reply = post(CHAT, body, some())
    assert reply.status == 400
    assert message_of(reply).startswith("inference error: BadRequest - ")
    assert reply.error["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "pool_fixture", [some(), PoolFixture({})], ids=["one endpoint", "no endpoints"]
)
def test_070_a_missing_model(pool_fixture: PoolFixture):
    """No model in the body: 400, before anybody looks for endpoints."""
    reply = post("/v1/completions", b'{"prompt":"hello world"}', pool_fixture)
    assert reply == ext_proc_script.refuse(
        400,
        message="inference error: BadRequest - model not found in request body",
        kind="invalid_request_error",
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (CHAT, "invalid chat completions request: must have valid messages field"),
        ("/v1/completions", "invalid completions request: must have prompt field"),
        ("/v1/embeddings", "invalid embeddings request: must have input field"),
        ("/v1/responses", "invalid responses request: must have input field"),
        ("/v1/conversations", "invalid conversations request: must have items field"),
        ("/v1/images/generations", "invalid images generations request: must have prompt field"),
    ],
)
def test_071_missing_fields(path: str, text: str):
    """A missing messages, prompt or input field: 400 in the reference's words."""
    reply = post(path, b'{"model":"m"}', some())
    assert message_of(reply) == f"inference error: BadRequest - {text}"


def test_073_filters_removed_every_endpoint():
    """Endpoints exist and the filters removed them all: 429."""
    pool_fixture = PoolFixture(
        {ext_proc_script.ADDRESS: None},
        profile=SchedulerProfile("strict", (RejectAll(),), (), RandomPicker()),
    )
    assert post("/x", b"x", pool_fixture) == ext_proc_script.refuse(
        429,
        message="inference error: ResourceExhausted - no endpoints available for the given request",
        kind="rate_limit_error",
        reason="rejected-saturated",
        retry_after="1",
    )


def test_075_no_reply_after_a_rejection():
    """After an immediate response no event gets an answer, in either direction."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(b"nonsense", ends=True),
            ext_proc_script.refuse(
                400,
                message="inference error: BadRequest - x",
                kind="invalid_request_error",
            ),
            ext_proc_script.request_body(b"more", ends=True),
            ext_proc_script.request_trailers(),
            ext_proc_script.response_headers(),
            ext_proc_script.response_body(b"x", ends=True),
            ext_proc_script.response_trailers(),
        ],
        lambda _: decision.bad_request("x"),
    )


def test_078_prefer_if_available_without_a_cached_prefix():
    """A conditional request is answered with 412 while the prediction has no cached prefix for it."""
    queued = ext_proc_script.Talk(some().decide)
    headers = {**ext_proc_script.PLAIN, ":path": CHAT, "prefer": "if-available"}
    queued.hear(ext_proc_script.request_headers(headers))
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    reply = queued.hear(ext_proc_script.request_body(body, ends=True))[0]
    queued.exchange.close()
    assert reply.status == 412
    assert message_of(reply).startswith("inference error: PreconditionFailed - ")


def test_078_prefer_if_available_without_a_body():
    """The header has no effect on a request without a body."""
    headers = {**ext_proc_script.PLAIN, "prefer": "if-available"}
    ext_proc_script.play(
        [ext_proc_script.request_headers(headers, ends=True), ext_proc_script.route()],
        some().decide,
    )


@pytest.mark.parametrize("status", sorted(messages.CANONICAL_CODES))
def test_079_statuses_are_envoys(status: int):
    """Every status of the vocabulary is a member of Envoy's enum and has a gRPC status."""
    reply = _refused(Rejection(status, "why"), grpc=True)
    assert reply.status == status
    assert reply.grpc_status not in (None, 2)
    assert reply.error == f"inference error: {messages.CANONICAL_CODES[status][0]} - why"


def test_079_grpc_clients_get_a_grpc_status():
    """A refusal of a gRPC request has a status and text of gRPC."""
    queued = ext_proc_script.Talk(PoolFixture({}).decide)
    headers = {":path": "/x/Y", "content-type": "application/grpc+proto"}
    (reply,) = queued.hear(ext_proc_script.request_headers(headers, ends=True))
    assert (reply.status, reply.grpc_status) == (503, 14)
    assert reply.error.startswith("inference error: ServiceUnavailable - failed to find ")
    assert "content-type" not in reply.headers


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages",
        "/v1/messages/count_tokens/?beta=true",
        "/v1/%6Dessages",
        "//v1//messages//count_tokens",
    ],
)
def test_refusals_on_paths_of_anthropic_have_its_form(path: str):
    """Clients of Anthropic read `type` beside the error, and an id."""
    queued = ext_proc_script.Talk(PoolFixture({}).decide)
    headers = {**ext_proc_script.PLAIN, ":path": path, "x-request-id": "r-1"}
    (reply,) = queued.hear(ext_proc_script.request_headers(headers, ends=True))
    error = reply.error.pop("error")
    assert reply.error == {"type": "error", "request_id": "r-1"}
    assert (error["type"], error["code"]) == ("server_error", 503)
    assert error["message"].startswith("inference error: ServiceUnavailable - ")


def test_079_error_bodies_are_json_whatever_the_message():
    """A message with quotes, line ends and other scripts is valid JSON in the body."""
    message = 'say "\u4e16\u754c"\n\\'
    body = messages.error_body(Rejection(400, message))
    assert json.loads(body)["error"]["message"].endswith(message)


def _refused(rejection: Rejection, *, grpc: bool) -> DecodedReply:
    headers = {"content-type": "application/grpc"} if grpc else {}
    reply = messages.immediate_response(rejection, headers)
    return peer.read(ext_proc_script.codec.encode(reply))
