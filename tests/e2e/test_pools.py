"""Several pools in one picker behind a real Envoy, by host, path, header and model."""

from __future__ import annotations

import json

import pytest

from tests.e2e import backend, http1, installation
from tests.e2e.test_models import listing

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engines(live):
    """One engine for each pool, by name."""
    with (
        live.holding(backend.backend()) as llama,
        live.holding(backend.backend()) as qwen,
        live.holding(backend.backend()) as batch,
    ):
        llama.plays["/v1/models"] = listing("llama", "sql")
        qwen.plays["/v1/models"] = listing("qwen")
        batch.plays["/v1/models"] = listing("llama")
        yield {"llama": llama, "qwen": qwen, "batch": batch}


@pytest.fixture(scope="module")
def config(engines, tmp_path_factory):
    """A configuration of three pools, two of them distinguished by the models they list."""
    at = {name: engine.address for name, engine in engines.items()}
    path = tmp_path_factory.mktemp("pools") / "extproc.yaml"
    path.write_text(
        f"""
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scrape: {{idle_interval_s: 0.2, models_interval_s: 0.2}}
pools:
- name: batch
  endpoints: ['{at["batch"]}']
  match: {{headers: {{x-tier: batch}}}}
  scheduling: {{strategy: round-robin}}
- name: hosted
  endpoints: ['{at["batch"]}']
  match: {{hosts: ['*.batch.example'], paths: [/v1]}}
- name: llama
  endpoints: ['{at["llama"]}']
- name: qwen
  endpoints: ['{at["qwen"]}']
"""
    )
    return path


@pytest.fixture(scope="module")
def place(live, engines, config, binary):
    arguments = ["--config-file", str(config), "--grpc-port", "0"]
    with live.holding(installation.installed(arguments=arguments, binary=binary)) as item:
        live.run(item.until(lambda result: known(result) >= {"llama", "qwen", "batch", "hosted"}))
        yield item


def known(result):
    """Pools whose endpoints listed their models."""
    head = "extproc_endpoint_models{"
    return {key.partition('pool="')[2].partition('"')[0] for key in result if key.startswith(head)}


async def ask(fixture, model="llama", *, path=CHAT, headers=()):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    return await http1.ask(fixture.port, path, body, headers=[*headers])


async def served(engines, name, asking):
    """Ask, and see that this engine got the request."""
    answer = await asking
    assert answer.status == 200
    assert json.loads(answer.body)["by"] == engines[name].address, name


async def test_a_header_selects_the_pool(place, engines):
    """A claim goes before what endpoints list."""
    await served(engines, "batch", ask(place, headers=[("x-tier", "batch")]))


async def test_a_host_and_a_path_select_the_pool(place, engines):
    """Both conditions of a claim must hold."""
    hosted = [("host", "a.batch.example")]
    await served(engines, "batch", ask(place, headers=hosted))
    await served(engines, "llama", ask(place, path="/other", headers=hosted))


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama", "llama"), ("sql", "llama"), ("qwen", "qwen"), ("llama_sql", "llama")],
)
async def test_listed_models_select_the_pool(place, engines, model, name):
    """Models, adapters and KubeAI's names, without a word of configuration."""
    await served(engines, name, ask(place, model))


async def test_an_unlisted_model_is_404(place):
    """The answer names what there is."""
    answer = await ask(place, "gpt")
    assert answer.status == 404
    error = json.loads(answer.body)["error"]
    assert error["code"] == "model_not_found"
    assert "llama, qwen, sql" in error["message"]


async def test_the_models_of_all_pools_are_one_list(place):
    """GET /v1/models is answered here; no engine sees it."""
    answer = await http1.ask(place.port, "/v1/models")
    assert answer.status == 200
    assert [load["id"] for load in json.loads(answer.body)["data"]] == ["llama", "qwen", "sql"]
    item = await http1.ask(place.port, "/v1/models/sql")
    assert json.loads(item.body)["parent"] == "llama"
    assert await place.total("extproc_direct_responses_total") >= 2


async def test_pages_show_every_pool(place, engines):
    """Metrics have the pool as a label, and the debug pages all of them."""
    await ask(place, "qwen")
    result = await place.metrics()
    picks = f'extproc_routed_requests_total{{endpoint="{engines["qwen"].address}",pool="qwen"}}'
    assert result[picks] >= 1
    pools = json.loads((await http1.ask(place.pages, "/debug/pools")).body)["pools"]
    assert list(pools) == ["batch", "hosted", "llama", "qwen"]
    item = json.loads((await http1.ask(place.pages, "/debug/pool?pool=qwen")).body)
    assert [entry["address"] for entry in item["endpoints"]] == [engines["qwen"].address]
    assert (await http1.ask(place.pages, "/debug/pool")).status == 404
    last = json.loads((await http1.ask(place.pages, "/debug/decisions?limit=1")).body)
    assert last["decisions"][0]["pool"] == "qwen"


async def test_matches_are_reloaded(place, engines, config):
    """An edited file sends the next request elsewhere."""
    text = config.read_text()
    installation.replace_file(config, text.replace("x-tier: batch", "x-tier: night"))
    try:
        await place.until(lambda result: result.get('extproc_config_reloads_total{result="ok"}', 0))
        await served(engines, "llama", ask(place, headers=[("x-tier", "batch")]))
        await served(engines, "batch", ask(place, headers=[("x-tier", "night")]))
    finally:
        installation.replace_file(config, text)
