"""Points of section B about request headers and metadata."""

from __future__ import annotations

import pytest

from extproc.protocol.exchange import ExchangeSettings
from extproc.protocol.headers import CONTROL_HEADERS
from tests.protocol.request_points import CHAT, THREE, build_pool
from tests.support import ext_proc_script, peer
from tests.support.pool_fixture import PoolFixture, load


def test_023_headers_are_set_by_raw_value_alone():
    """Every header we set carries raw_value and no value, on picks, responses and refusals."""
    queued = ext_proc_script.Talk(build_pool().decide, request_id="made")
    messages = (
        ext_proc_script.request_headers({":path": "/v1/models"}, ends=True),
        ext_proc_script.response_headers(),
    )
    # The peer refuses to read a header that has `value` set.
    replies = [replies for message in messages for replies in queued.hear(message)]
    assert [len(reply.sets) for reply in replies] == [2, 1]
    refused = ext_proc_script.Talk(PoolFixture({}).decide).hear(
        ext_proc_script.request_headers(ends=True)
    )
    assert len(refused[0].sets) == 3


def test_024_header_and_metadata_agree():
    """The destination stands in the header and, equal, in the envoy.lb metadata."""
    (reply,) = ext_proc_script.Talk(ext_proc_script.always(*THREE)).hear(
        ext_proc_script.request_headers(ends=True)
    )
    assert reply.headers[peer.DESTINATION] == ",".join(THREE)
    assert reply.metadata == {"envoy.lb": {peer.DESTINATION: reply.headers[peer.DESTINATION]}}


def test_035_request_headers_are_not_echoed():
    """Only our own headers are set, so that duplicates reach the engine as they came."""
    headers = [*ext_proc_script.PLAIN.items(), ("cookie", "a=1"), ("cookie", "b=2")]
    headers += [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "2.2.2.2")]
    ext_proc_script.play(
        [ext_proc_script.request_headers(headers, ends=True), ext_proc_script.route()]
    )


@pytest.mark.parametrize("raw", [True, False], ids=["raw_value", "value"])
def test_036_header_names_in_any_case_and_either_value(raw: bool):  # noqa: FBT001
    """Names are compared without case, and raw_value or value alone is read."""
    headers = {":path": "/x", "X-Request-ID": "r", "Content-Type": "text/Plain"}
    queued = ext_proc_script.play(
        [ext_proc_script.request_headers(headers, ends=True, raw=raw), ext_proc_script.route()]
    )
    assert queued.decided[0].headers == {
        ":path": "/x",
        "x-request-id": "r",
        "content-type": "text/Plain",
    }


def test_036_raw_value_comes_before_value():
    """Of a header with both values, raw_value is read."""
    header = peer.core.HeaderValue(key="A", value="plain", raw_value=b"raw")
    content = peer.ext_proc.HttpHeaders(
        headers=peer.core.HeaderMap(headers=[header]), end_of_stream=True
    )
    queued = ext_proc_script.play(
        [ext_proc_script.Message("request_headers", content), ext_proc_script.route()]
    )
    assert queued.decided[0].headers == {"a": "raw"}


def test_037_a_request_id_is_set_when_there_is_one():
    """The request id the shell makes for a request without one is set on the pick."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({":path": "/"}, ends=True),
            ext_proc_script.route(sets=[("x-request-id", "made")]),
        ],
        request_id="made",
    )
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({":path": "/"}),
            ext_proc_script.go_on("request_headers"),
            ext_proc_script.request_body(b"x", ends=True),
            ext_proc_script.route(part="request_body", sets=[("x-request-id", "made")]),
        ],
        request_id="made",
        modes=("BUFFERED", "NONE"),
    )


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"TraceParent": "garbage", "tracestate": "a=b"},
    ],
)
def test_038_trace_context_passes(trace: dict[str, str]):
    """Trace headers are neither needed, replaced nor removed."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({**ext_proc_script.PLAIN, **trace}, ends=True),
            ext_proc_script.route(),
        ],
        build_pool().decide,
    )


def test_039_a_clients_destination_is_overwritten():
    """The destination header of the client is set anew, and not appended to."""
    headers = {**ext_proc_script.PLAIN, peer.DESTINATION: "6.6.6.6:66"}
    ext_proc_script.play(
        [ext_proc_script.request_headers(headers, ends=True), ext_proc_script.route()],
        build_pool().decide,
    )


@pytest.mark.parametrize("name", sorted(CONTROL_HEADERS))
def test_040_control_headers_are_removed(name: str):
    """A control header of the client is removed and never set."""
    headers = {**ext_proc_script.PLAIN, name.title(): "x"}
    ext_proc_script.play(
        [ext_proc_script.request_headers(headers, ends=True), ext_proc_script.route(removes=[name])]
    )


def test_040_control_headers_are_removed_with_a_buffered_body():
    """In the buffered modes the answer that carries the pick removes them."""
    headers = {**ext_proc_script.PLAIN, "x-llm-d-inference-objective": "o"}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers),
            ext_proc_script.go_on("request_headers"),
            ext_proc_script.request_body(b"x", ends=True),
            ext_proc_script.route(part="request_body", removes=["x-llm-d-inference-objective"]),
        ],
        modes=("BUFFERED", "NONE"),
    )


@pytest.mark.parametrize(
    "metadata", [None, peer.metadata_of({}), peer.metadata_of({"other": {"a": "b"}})]
)
def test_043_metadata_is_optional(metadata: object):
    """No metadata, empty metadata and foreign metadata are legal and hint nothing."""
    queued = ext_proc_script.play(
        [ext_proc_script.request_headers(ends=True, metadata=metadata), ext_proc_script.route()],
        build_pool().decide,
    )
    assert queued.decided[0].subset is None


@pytest.mark.parametrize("where", ["headers", "body", "both", "conflict"])
def test_044_a_hint_on_headers_or_body(where: str):
    """A hint counts on the headers, on a body message or on both; a later one wins."""
    hint = peer.hinted([THREE[1]])
    other = peer.hinted([THREE[0]]) if where == "conflict" else hint
    queued = ext_proc_script.play(
        [
            ext_proc_script.request_headers(metadata=other if where != "body" else None),
            ext_proc_script.request_body(
                CHAT, ends=True, metadata=hint if where != "headers" else None
            ),
            ext_proc_script.route(THREE[1]),
            ext_proc_script.hand_on(CHAT, ends=True),
        ],
        build_pool(*THREE).decide,
    )
    assert queued.decided[0].subset == (THREE[1],)


def test_044_an_empty_later_hint_does_not_widen_or_close():
    """An empty hint after one that names endpoints does not replace it."""
    queued = ext_proc_script.Talk()
    queued.hear(ext_proc_script.request_headers(metadata=peer.hinted([THREE[1]])))
    queued.hear(ext_proc_script.request_body(b"", ends=True, metadata=peer.hinted([])))
    assert queued.decided[0].subset == (THREE[1],)


@pytest.mark.parametrize("modes", [("DUPLEX", "DUPLEX"), ("BUFFERED", "NONE"), ("NONE", "NONE")])
@pytest.mark.parametrize(
    ("wanted", "profile"), [(True, "balanced"), (False, "balanced"), (True, "random")]
)
def test_024_scores_beside_the_destination(modes: tuple[str, str], profile: str, *, wanted: bool):
    """On demand the metadata have the score of every scored endpoint."""
    queued = PoolFixture(dict.fromkeys(THREE, load(0, 0.0)), profile=profile)
    talk = ext_proc_script.Talk(
        queued.decide, modes=modes, settings=ExchangeSettings(1 << 20, scores=wanted)
    )
    replies = talk.hear(ext_proc_script.request_headers())
    if modes[0] != "NONE":
        replies += talk.hear(ext_proc_script.request_body(CHAT, ends=True))
    (metadata,) = [reply.metadata[peer.BALANCER] for reply in replies if reply.metadata]
    scores = metadata.pop("x-gateway-destination-endpoint-scores", None)
    assert list(metadata) == [peer.DESTINATION]
    if not wanted or profile == "random":
        assert scores is None
        return
    assert set(scores) == set(THREE)
    assert scores[metadata[peer.DESTINATION]] == max(scores.values())
