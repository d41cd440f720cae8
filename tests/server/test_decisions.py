from extproc.endpoint import Load
from extproc.telemetry import explanation
from tests.support import ext_proc_script, serving
from tests.support.pool_fixture import House

HEADERS = {**ext_proc_script.PLAIN, "x-request-id": "id-7"}


def test_a_decision_is_recorded_with_its_result():
    """The ring knows a routed request by its id, and its status once the stream ends."""

    async def test() -> None:
        async with serving.serving(House({ext_proc_script.ADDRESS: Load(at=0.0)})) as server:
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

    serving.run(test())


def test_the_decision_header_is_added_when_enabled():
    """With decisions.header the answer says who was chosen and why."""

    async def test() -> None:
        house = House({ext_proc_script.ADDRESS: Load(at=0.0)})
        async with serving.serving(house, format_decision=explanation.format_short) as server:
            stream = server.stream()
            await stream.say(ext_proc_script.request_headers(HEADERS, ends=True))
            await stream.hear()
            await stream.say(ext_proc_script.response_headers())
            (response,) = await stream.hear()
            assert response.headers["x-extproc-decision"].startswith(
                f"balanced; chose={ext_proc_script.ADDRESS}; "
            )
            await stream.end()

    serving.run(test())
