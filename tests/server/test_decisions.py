import pytest

from extproc.decision import NO_ENDPOINTS, DirectResponse
from extproc.endpoint import Load
from extproc.protocol.exchange import ExchangeSettings
from extproc.telemetry import explanation
from extproc.wire import codec
from tests.support import ext_proc_script, serving
from tests.support.pool_fixture import PoolFixture

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
HEADERS = {**ext_proc_script.PLAIN, "x-request-id": "id-7"}


async def test_a_decision_is_recorded_with_its_result():
    """The ring knows a routed request by its id, and its status once the stream ends."""
    async with serving.serving(PoolFixture({ext_proc_script.ADDRESS: Load(at=0.0)})) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(HEADERS, ends=True))
        await stream.hear()
        record = server.servicer.shared.observer.decisions.find("id-7")
        assert record.decision.endpoints[0].address == ext_proc_script.ADDRESS
        assert (record.status, record.seconds) == ("", None)
        await stream.say(ext_proc_script.response_headers())
        (response,) = await stream.hear()
        assert "x-extproc-decision" not in response.headers
        await stream.end()
        await server.idle()
        assert (record.status, record.seconds) == ("200", 0.0)


async def test_the_decision_header_is_added_when_enabled():
    """With decisions.header the answer says who was chosen and why."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: Load(at=0.0)})
    async with serving.serving(pool_fixture, format_decision=explanation.format_short) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(HEADERS, ends=True))
        await stream.hear()
        await stream.say(ext_proc_script.response_headers())
        (response,) = await stream.hear()
        assert response.headers["x-extproc-decision"].startswith(
            f"balanced; chose={ext_proc_script.ADDRESS}; "
        )
        await stream.end()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_decision_is_metadata_of_the_pick(method):
    """It is beside the destination, in a namespace of its own, whether a body waits or not."""
    pool_fixture = PoolFixture({ext_proc_script.ADDRESS: Load(at=0.0)})
    async with serving.serving(pool_fixture, describe_decision=explanation.format_short) as server:
        stream = server.stream()
        headers = {**HEADERS, ":method": method, ":path": "/v1/chat/completions"}
        await stream.say(ext_proc_script.request_headers(headers, ends=method == "GET"))
        if method == "POST":
            await stream.say(ext_proc_script.request_body(CHAT, ends=True))
        (pick,) = [reply for reply in await stream.hear() if reply.metadata]
        assert pick.metadata["envoy.lb"]
        assert pick.metadata["extproc"]["decision"].startswith(
            f"balanced; chose={ext_proc_script.ADDRESS}; "
        )
        await stream.end()


@pytest.mark.parametrize(("sent", "returned"), [("id-7", "id-7"), ("", "made-1")])
def test_the_request_id_is_returned_where_wanted(sent, returned):
    """It is that of the data plane, or the one that the engine gets."""
    settings = ExchangeSettings(1 << 20, request_id=True)
    talk = ext_proc_script.Talk(settings=settings, request_id="" if sent else "made-1")
    headers = {**ext_proc_script.PLAIN, "x-request-id": sent}
    talk.hear(ext_proc_script.request_headers(headers, ends=True))
    (response,) = talk.hear(ext_proc_script.response_headers())
    assert response.headers["x-request-id"] == returned


def test_refusals_return_the_request_id_where_wanted():
    """A client that is refused has an id to ask for as well."""
    for wanted in (True, False):
        settings = ExchangeSettings(1 << 20, request_id=wanted)
        talk = ext_proc_script.Talk(lambda _: NO_ENDPOINTS, settings=settings)
        (response,) = talk.hear(ext_proc_script.request_headers(HEADERS, ends=True))
        assert response.status == 503
        assert response.headers.get("x-request-id", "") == ("id-7" if wanted else "")


@pytest.mark.parametrize("wanted", [True, False])
def test_direct_responses_return_the_request_id_where_wanted(wanted):
    """A list of models that extproc writes itself is a response like any other."""
    settings = ExchangeSettings(1 << 20, request_id=wanted)
    talk = ext_proc_script.Talk(settings=settings)
    event = codec.decode(ext_proc_script.request_headers(HEADERS, ends=True).encode(None))
    assert not list(talk.exchange.receive(event))
    response = talk.exchange.answer(DirectResponse(200, b"{}"))
    own = (("x-request-id", "id-7"),) if wanted else ()
    assert response.headers == (("content-type", "application/json"), *own)
    assert talk.exchange.pending is None
