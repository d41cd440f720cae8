from __future__ import annotations

import asyncio
import collections
import re
from pathlib import Path

import pytest

from tests.simulator import engine_server
from tests.simulator.engine_server import chat

DATA = Path(__file__).parents[2] / "data"
#: The machine of the captures: 256 blocks of 32 tokens, 16 sequences, 2 adapter slots.
TINY = {
    "kv_tokens": 8192,
    "block_tokens": 32,
    "max_num_seqs": 16,
    "max_model_len": 4096,
    "max_loras": 2,
}


def skeleton(page):
    """The page's lines with numbers and addresses of the moment left out."""
    lines = []
    for line in page.splitlines():
        text = line if line.startswith("#") else line.rpartition(" ")[0]
        lines.append(re.sub(r'version="[^"]*"|patchlevel="[^"]*"', "", text))
    return lines


def samples(page):
    """Sample values by series."""
    pairs = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def scrape(client):
    return await (await client.get("/metrics")).text()


async def test_an_idle_page_is_line_by_line_a_real_one():
    """Names, labels, order, HELP and TYPE of a fresh vLLM 0.32; no LoRA sample yet."""
    async with engine_server.engine(model="tiny", machine=TINY) as (_, client):
        page = await scrape(client)
    real = (DATA / "vllm-0.32-idle.txt").read_text()
    assert skeleton(page) == skeleton(real)
    assert "vllm:lora_requests_info{" not in page


async def test_a_page_after_load_is_line_by_line_a_real_one():
    """After requests to the base model with LoRA on: the empty adapter set, HTTP families."""
    async with engine_server.engine(model="tiny", machine=TINY) as (_, client):
        for _ in range(3):
            await client.post("/v1/completions", json={"prompt": "x" * 900, "max_tokens": 4})
        page = await scrape(client)
    real = (DATA / "vllm-0.32-after-lora-load.txt").read_text()
    assert skeleton(page) == skeleton(real)


async def test_counters_agree_with_what_was_served():
    """Tokens, hits, requests, histograms, and usage 0 with a full cache."""
    async with engine_server.engine() as (_, client):
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "x" * 640, "max_tokens": 9})
        values = samples(await scrape(client))
    label = '{engine="0",model_name="demo"}'
    assert values[f"vllm:prefix_cache_queries_total{label}"] == 320
    assert values[f"vllm:prefix_cache_hits_total{label}"] == 144
    assert values[f"vllm:prompt_tokens_total{label}"] == 320
    assert values[f"vllm:generation_tokens_total{label}"] == 18
    assert values[f"vllm:kv_cache_usage_perc{label}"] == 0
    assert values[f"vllm:num_requests_running{label}"] == 0
    assert values[f"vllm:time_to_first_token_seconds_count{label}"] == 2
    assert values[f"vllm:inter_token_latency_seconds_count{label}"] == 16
    assert values[f"vllm:request_prefill_kv_computed_tokens_sum{label}"] == 176
    done = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"}'
    assert values[done] == 2
    assert values["process_start_time_seconds"] > 1e9


def sums(page):
    """Sums over the series of each family: counters without `_total`, histograms' sum and count."""
    totals = collections.Counter()
    for series, value in samples(page).items():
        name, _, labels = series.partition("{")
        source = re.search(r'source="([^"]*)"', labels)
        totals[f"{name}/{source[1]}" if source else name] += value
    return totals


def assert_counts_fit(page, *, requests):
    """Assert relations between the families of a page once every request was answered."""
    totals = sums(page)

    def vllm(name):
        return totals[f"vllm:{name}"]

    computed = vllm("prompt_tokens_by_source_total/local_compute")
    hits = vllm("prompt_tokens_by_source_total/local_cache_hit")
    generated = vllm("generation_tokens_total")
    assert computed > 0
    assert hits == vllm("prefix_cache_hits_total") == vllm("prompt_tokens_cached_total")
    assert computed + hits == vllm("prompt_tokens_total") == vllm("prefix_cache_queries_total")
    assert vllm("request_prompt_tokens_sum") == computed + hits
    assert vllm("request_generation_tokens_sum") == generated
    assert vllm("request_params_max_tokens_sum") == generated
    assert vllm("iteration_tokens_total_sum") == computed + generated
    assert vllm("request_prefill_kv_computed_tokens_sum") == computed
    assert vllm("inter_token_latency_seconds_count") == generated - requests
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert vllm(f"{name}_count") == requests
    assert vllm("request_success_total") == requests
    assert vllm("request_num_preemptions_sum") == vllm("num_preemptions_total")
    times = {
        part: vllm(f"request_{part}_time_seconds_sum")
        for part in ("queue", "inference", "prefill", "decode")
    }
    assert times["inference"] == pytest.approx(times["prefill"] + times["decode"])
    # Of an engine that cannot keep its pace, time between two steps belongs to no step.
    assert vllm("inter_token_latency_seconds_sum") <= times["decode"] * (1 + 1e-9)
    total_s = vllm("e2e_request_latency_seconds_sum")
    assert times["queue"] + times["inference"] <= total_s * (1 + 1e-9)
    assert times["queue"] + times["prefill"] <= vllm("time_to_first_token_seconds_sum") + 1e-9


async def test_counters_fit_each_other_as_on_a_real_page():
    """The same sums agree on the capture and on ours, preemptions and chunked prompts included."""
    assert_counts_fit((DATA / "vllm-0.32-after-lora-load.txt").read_text(), requests=120)
    small = {"kv_tokens": 1024, "token_budget": 64, "max_num_seqs": 8}
    async with engine_server.engine(machine=small, loras=("a",), speed=100.0) as (server, client):
        bodies = [
            {"model": model, "prompt": f"{n % 4}" * 800, "max_tokens": 60, "stream": bool(n % 2)}
            for n, model in enumerate(["demo", "a"] * 8)
        ]
        await asyncio.gather(*(read(client.post("/v1/completions", json=body)) for body in bodies))
        page = await scrape(client)
        assert server.engine.preemptions
        assert server.engine.prefix_hits
    assert_counts_fit(page, requests=len(bodies))


async def read(request):
    async with request as response:
        return await response.read()


async def test_gauges_show_what_runs_and_what_waits():
    """One runs, two wait for the batch, and live blocks are in use."""
    async with engine_server.engine(speed=0.001, machine={"max_num_seqs": 1}) as (server, client):
        tasks = [
            asyncio.ensure_future(client.post("/v1/chat/completions", json=chat("x" * 2000)))
            for _ in range(3)
        ]
        await engine_server.until(lambda: server.engine.running == 1)
        await engine_server.until(lambda: server.engine.waiting == 2)
        values = samples(await scrape(client))
        label = '{engine="0",model_name="demo"}'
        assert values[f"vllm:num_requests_running{label}"] == 1
        assert values[f"vllm:num_requests_waiting{label}"] == 2
        assert 0 < values[f"vllm:kv_cache_usage_perc{label}"] < 1
        await engine_server.leave(*tasks)


async def test_lora_label_sets_accumulate_and_name_running_adapters_twice():
    """Every set ever reported stays; the live one is the newest; waiting repeats running."""
    async with engine_server.engine(loras=("b", "a")) as (_, client):
        for model in ("a", "b"):
            await client.post("/v1/completions", json={"model": model, "prompt": "x"})
        values = {
            name: value
            for name, value in samples(await scrape(client)).items()
            if "lora_req" in name
        }

    def series(adapters):
        return (
            f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{adapters}",'
            f'waiting_lora_adapters="{adapters}"}}'
        )

    assert set(values) == {series("a"), series("b"), series("")}
    assert max(values, key=values.get) == series("")
    assert values[series("a")] < values[series("b")]


async def test_sets_of_adapters_of_several_ranks_are_there_once():
    """The series have no label of a rank, and a page has none twice."""
    async with engine_server.engine(loras=("a",), ranks=2) as (_, client):
        for rank in ("0", "1"):
            ask = {"model": "a", "prompt": "x"}
            await client.post("/v1/completions", json=ask, headers={"x-data-parallel-rank": rank})
        page = await scrape(client)
    series = [
        line.rpartition(" ")[0] for line in page.splitlines() if "lora_requests_info{" in line
    ]
    assert len(series) == len(set(series)) == 2


async def test_refusals_of_every_rank_are_counted():
    """The counter has no label of a rank: it is that of the server."""
    slow = {"speed": 1e-3, "ranks": 2, "machine": {"max_queued": 1}}
    async with engine_server.engine(**slow) as (subject, client):

        def ask(rank):
            headers = {"x-data-parallel-rank": str(rank)}
            return client.post("/v1/chat/completions", json=chat("hi"), headers=headers)

        task = asyncio.ensure_future(ask(1))
        await engine_server.until(lambda: subject.ranks[1].engine.running)
        assert (await ask(1)).status == 503
        values = samples(await scrape(client))
        await engine_server.leave(task)
    rejections = {
        name: value for name, value in values.items() if "admission_rejections_total" in name
    }
    assert sum(rejections.values()) == 1


async def test_without_lora_there_is_no_lora_family():
    """max_loras 0 turns it off, and an adapter is unknown."""
    async with engine_server.engine(machine={"max_loras": 0}) as (_, client):
        await client.post("/v1/completions", json={"prompt": "x"})
        assert "lora" not in (await scrape(client)).replace("(LoRA", "")
