"""A running picker names the endpoints that do stages of a request wherever it shows decisions."""

from __future__ import annotations

import aiohttp
import msgspec

from extproc.config import loader
from extproc.config.pool_sections import EndpointEntry
from tests.support import disaggregation, ext_proc_script, serving

HEADERS = {**ext_proc_script.PLAIN, "x-request-id": "id-7"}


def configuration():
    """One engine for each stage."""
    plain = serving.settings(llmd_metrics=True)
    epp = loader.settings(loader.parse(disaggregation.FILE, where="x"))
    roles = disaggregation.ROLES.items()
    pool = msgspec.structs.replace(
        plain.pool,
        endpoints=tuple(
            EndpointEntry(address=address, labels={"llm-d.ai/role": role})
            for address, role in roles
            if address != disaggregation.OTHER_PREFILL
        ),
    )
    decisions = msgspec.structs.replace(plain.decisions, header=True)
    return msgspec.structs.replace(plain, pool=pool, scheduling=epp.scheduling, decisions=decisions)


async def route(running):
    """Route a request, and return the header of its response that shows the decision."""
    async with running.channel() as channel:
        stream = serving.Stream(channel)
        body = disaggregation.request().body
        await stream.say(
            ext_proc_script.request_headers(HEADERS),
            ext_proc_script.request_body(body, ends=True),
            ext_proc_script.response_headers(),
        )
        shown = ""
        while not shown:
            (reply,) = await stream.hear()
            shown = reply.headers.get("x-extproc-decision", "")
        await stream.end()
    return shown


async def test_a_running_picker_shows_stages():
    """In the header of the response, on the pages of decisions and in the metrics."""
    async with serving.running(configuration()) as running:
        await running.sync()
        shown = await route(running)
        stages = f"; prefill={disaggregation.PREFILL}; encode=here:no-media"
        assert shown.endswith(stages)
        url = f"http://{serving.LOCAL}:{running.ports.pages}"
        async with aiohttp.ClientSession(url) as session:
            page = await (await session.get("/debug/decisions")).json()
            document = await (await session.get("/debug/decisions/id-7")).json()
            metrics = await (await session.get("/metrics")).text()
        assert page["decisions"][0]["why"] == shown
        assert document["endpoints"] == [disaggregation.DECODE]
        assert document["disaggregation"]["prefill"]["endpoints"] == [disaggregation.PREFILL]
        assert document["disaggregation"]["encode"]["reason"] == "no-media"
        for name in (
            'extproc_disaggregation_decisions_total{model="m",',
            "extproc_disaggregation_kept_stages_total{pool=",
            'llm_d_epp_disagg_decision_total{decision_type="prefill-decode",model_name="m",',
            'llm_d_epp_pd_decision_total{decision_type="prefill-decode",model_name="m",',
            "llm_d_epp_request_size_bytes_count{",
            "llm_d_epp_request_processing_duration_seconds_count 1",
        ):
            assert f"\n{name}" in metrics
