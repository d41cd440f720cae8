"""Points of section B about request headers and metadata."""

from __future__ import annotations

import pytest

from extproc.protocol.headers import CONTROL_HEADERS
from extproc.protocol.settings import ExchangeSettings
from tests.protocol.request_points import CHAT, THREE, house
from tests.support import conversation as talk
from tests.support import peer
from tests.support.house import House, load


def test_023_headers_are_set_by_raw_value_alone():
    """Every header we set carries raw_value and no value, on picks, responses and refusals."""
    held = talk.Talk(house().decide, request_id="made")
    messages = (
        talk.request_headers({":path": "/v1/models"}, ends=True),
        talk.response_headers(),
    )
    # The peer refuses to read a header that has `value` set.
    said = [said for message in messages for said in held.hear(message)]
    assert [len(each.sets) for each in said] == [2, 1]
    refused = talk.Talk(House({}).decide).hear(talk.request_headers(ends=True))
    assert len(refused[0].sets) == 3


def test_024_header_and_metadata_agree():
    """The destination stands in the header and, equal, in the envoy.lb metadata."""
    (said,) = talk.Talk(talk.always(*THREE)).hear(talk.request_headers(ends=True))
    assert said.headers[peer.DESTINATION] == ",".join(THREE)
    assert said.told == {"envoy.lb": {peer.DESTINATION: said.headers[peer.DESTINATION]}}


def test_035_request_headers_are_not_echoed():
    """Only our own headers are set, so that duplicates reach the engine as they came."""
    headers = [*talk.PLAIN.items(), ("cookie", "a=1"), ("cookie", "b=2")]
    headers += [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "2.2.2.2")]
    talk.play([talk.request_headers(headers, ends=True), talk.route()])


@pytest.mark.parametrize("raw", [True, False], ids=["raw_value", "value"])
def test_036_header_names_in_any_case_and_either_value(raw: bool):  # noqa: FBT001
    """Names are compared without case, and raw_value or value alone is read."""
    headers = {":path": "/x", "X-Request-ID": "r", "Content-Type": "text/Plain"}
    held = talk.play([talk.request_headers(headers, ends=True, raw=raw), talk.route()])
    assert held.asked[0].headers == {
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
    held = talk.play([talk.Message("request_headers", content), talk.route()])
    assert held.asked[0].headers == {"a": "raw"}


def test_037_a_request_id_is_set_when_given():
    """The request id the shell makes for a request without one is set on the pick."""
    talk.play(
        [
            talk.request_headers({":path": "/"}, ends=True),
            talk.route(sets=[("x-request-id", "made")]),
        ],
        request_id="made",
    )
    talk.play(
        [
            talk.request_headers({":path": "/"}),
            talk.go_on("request_headers"),
            talk.request_body(b"x", ends=True),
            talk.route(part="request_body", sets=[("x-request-id", "made")]),
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
    talk.play(
        [talk.request_headers({**talk.PLAIN, **trace}, ends=True), talk.route()], house().decide
    )


def test_039_a_clients_destination_is_overwritten():
    """The destination header of the client is set anew, and not appended to."""
    headers = {**talk.PLAIN, peer.DESTINATION: "6.6.6.6:66"}
    talk.play([talk.request_headers(headers, ends=True), talk.route()], house().decide)


@pytest.mark.parametrize("name", sorted(CONTROL_HEADERS))
def test_040_control_headers_are_removed(name: str):
    """A control header of the client is removed and never set."""
    headers = {**talk.PLAIN, name.title(): "x"}
    talk.play([talk.request_headers(headers, ends=True), talk.route(removes=[name])])


def test_040_control_headers_are_removed_with_a_buffered_body():
    """In the buffered modes the answer that carries the pick removes them."""
    headers = {**talk.PLAIN, "x-llm-d-inference-objective": "o"}
    talk.play(
        [
            talk.request_headers(headers),
            talk.go_on("request_headers"),
            talk.request_body(b"x", ends=True),
            talk.route(part="request_body", removes=["x-llm-d-inference-objective"]),
        ],
        modes=("BUFFERED", "NONE"),
    )


@pytest.mark.parametrize(
    "metadata", [None, peer.metadata_of({}), peer.metadata_of({"other": {"a": "b"}})]
)
def test_043_metadata_is_optional(metadata: object):
    """No metadata, empty metadata and foreign metadata are legal and hint nothing."""
    held = talk.play(
        [talk.request_headers(ends=True, metadata=metadata), talk.route()], house().decide
    )
    assert held.asked[0].subset is None


@pytest.mark.parametrize("where", ["headers", "body", "both", "conflict"])
def test_044_a_hint_on_headers_or_body(where: str):
    """A hint counts on the headers, on a body message or on both; a later one wins."""
    hint = peer.hinted([THREE[1]])
    other = peer.hinted([THREE[0]]) if where == "conflict" else hint
    held = talk.play(
        [
            talk.request_headers(metadata=other if where != "body" else None),
            talk.request_body(CHAT, ends=True, metadata=hint if where != "headers" else None),
            talk.route(THREE[1]),
            talk.hand_on(CHAT, ends=True),
        ],
        house(*THREE).decide,
    )
    assert held.asked[0].subset == (THREE[1],)


def test_044_an_empty_later_hint_does_not_widen_or_close():
    """An empty hint after one that names endpoints does not replace it."""
    held = talk.Talk()
    held.hear(talk.request_headers(metadata=peer.hinted([THREE[1]])))
    held.hear(talk.request_body(b"", ends=True, metadata=peer.hinted([])))
    assert held.asked[0].subset == (THREE[1],)


@pytest.mark.parametrize("modes", [("DUPLEX", "DUPLEX"), ("BUFFERED", "NONE"), ("NONE", "NONE")])
@pytest.mark.parametrize(
    ("wanted", "profile"), [(True, "balanced"), (False, "balanced"), (True, "random")]
)
def test_024_scores_beside_the_destination(modes: tuple[str, str], profile: str, *, wanted: bool):
    """Where it is wanted and something was compared, every finalist's score is in the metadata."""
    held = House(dict.fromkeys(THREE, load(0, 0.0)), profile=profile)
    one = talk.Talk(held.decide, modes=modes, settings=ExchangeSettings(1 << 20, scores=wanted))
    said = one.hear(talk.request_headers())
    if modes[0] != "NONE":
        said += one.hear(talk.request_body(CHAT, ends=True))
    (told,) = [each.told[peer.BALANCER] for each in said if each.told]
    scores = told.pop("x-gateway-destination-endpoint-scores", None)
    assert list(told) == [peer.DESTINATION]
    if not wanted or profile == "random":
        assert scores is None
        return
    assert set(scores) == set(THREE)
    assert scores[told[peer.DESTINATION]] == max(scores.values())
