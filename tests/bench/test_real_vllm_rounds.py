"""Tests of the rounds with tight caches on real engines, without vLLM."""

import asyncio
import contextlib
import json
from collections import Counter
from itertools import takewhile

import pytest

from bench.real_vllm import client, replicas, rounds, tiny, workload
from bench.real_vllm.counters import EngineAnswer

BLOCKS = replicas.COUNT * replicas.BLOCKS


@pytest.mark.parametrize("name", ["shared prefixes", "mixed lengths", "bursts", "adapters"])
def test_shared_beginnings_fill_both_caches_once(name):
    """Each with the end of one request; as many tokens on either replica with perfect affinity."""
    asks = workload.tight("m", seed=1)[name].asks
    texts = [
        sorted(ask.text for ask in asks if ask.group == group)
        for group in range(workload.TIGHT_GROUPS)
    ]
    shared = [_same(group[0], group[-1]) // 4 for group in texts]
    ends = sum(len(ask.text) // 4 for ask in asks) / len(asks) - sum(shared) / len(shared)
    tokens = sum(shared) + len(shared) * ends
    assert 0.85 <= tokens / (BLOCKS * replicas.BLOCK_TOKENS) <= 1.05
    halves = sum(shared[0::2]), sum(shared[1::2])
    assert halves[0] == halves[1]


def _same(text, other):
    """Letters with which both texts begin."""
    return sum(
        1 for _ in takewhile(lambda pair: len(set(pair)) == 1, zip(text, other, strict=False))
    )


def test_mixed_requests_are_of_many_lengths():
    """Beginnings, ends and answers; alike ones keep theirs."""
    mixed = workload.tight("m", seed=1)["mixed lengths"].asks
    assert len({ask.output_tokens for ask in mixed}) > 20
    assert len({len(ask.text) for ask in mixed}) > 50
    alike = workload.tight("m", seed=1)["shared prefixes"].asks
    assert {(ask.output_tokens, len(ask.text)) for ask in alike} == {(8, 4 * 552)}
    assert mixed[0].body()["max_tokens"] == mixed[0].output_tokens


def test_adapters_have_groups_of_their_own():
    """As many of each adapter."""
    asks = workload.tight("m", seed=1)["adapters"].asks
    groups = {(ask.model, ask.group) for ask in asks}
    assert Counter(model for model, _ in groups) == dict.fromkeys(tiny.ADAPTERS, 14)
    assert len({group for _, group in groups}) == 28


@pytest.mark.parametrize(("in_bursts", "most"), [(True, [1, 2, 3] * 3), (False, None)])
def test_a_burst_waits_for_the_one_before(monkeypatch, in_bursts, most):
    """Three are sent together, the next once these are answered; otherwise at most three are open."""
    open_requests, open_counts = 0, []

    async def send(session, url, ask):
        nonlocal open_requests
        open_requests += 1
        open_counts.append(open_requests)
        for _ in range(ask.group + 1):
            await asyncio.sleep(0)
        open_requests -= 1
        return EngineAnswer(status=200, prompt_tokens=ask.group)

    monkeypatch.setattr(client, "send", send)
    asks = [workload.WorkloadRequest("m", "t", group) for group in range(9)]
    answers = asyncio.run(client.play(None, [""] * 9, asks, at_once=3, in_bursts=in_bursts))
    assert [answer.prompt_tokens for answer in answers] == list(range(9))
    assert max(open_counts) == 3
    assert open_counts == (most or open_counts)


def test_every_strategy_is_first_in_one_round():
    """The order rotates, so what a run leaves behind meets each strategy alike."""
    orders = [rounds.rotated(number) for number in range(rounds.ROUNDS)]
    for place in range(len(rounds.STRATEGIES)):
        assert {order[place] for order in orders} == set(rounds.STRATEGIES)


def one_round(adaptive_hits, adaptive_ms, failed=0):
    rows = {
        name: {
            "failed": 0,
            "hit_ratio": 0.5,
            "ttft_p50_ms": 100.0,
            "ttft_p95_ms": 200.0,
            "requests_by_replica": [60, 40],
        }
        for name in rounds.STRATEGIES
    }
    rows["round-robin"]["hit_ratio"] = 0.3
    rows["affinity"]["hit_ratio"] = 0.8
    rows["adaptive"] |= {
        "failed": failed,
        "hit_ratio": adaptive_hits,
        "ttft_p50_ms": adaptive_ms,
        "ttft_p95_ms": 2 * adaptive_ms,
    }
    return rows


def test_hits_are_placed_between_round_robin_and_affinity():
    """Within a round; the summary is the median of the rounds."""
    figures = [one_round(0.3, 80.0), one_round(0.8, 90.0), one_round(0.55, 150.0)]
    assert rounds.way(figures[2])["adaptive"] == pytest.approx(0.5)
    row = rounds.summarize(figures)["adaptive"]
    assert (row["way"], row["hit_ratio"]) == (0.5, 0.55)
    assert (row["ttft_p50"], row["ttft_p50_ratio"], row["ttft_p95_ratio"]) == (90.0, 0.9, 0.9)


def test_missed_bars_are_named():
    """Hits, both times, and failures; nothing where all is met."""
    assert rounds.missed({"bursts": [one_round(0.79, 90.0)]}) == []
    lines = rounds.missed({"bursts": [one_round(0.6, 110.0, failed=2)]})
    assert len(lines) == 4
    assert all(line.startswith("bursts: ") for line in lines)


def test_the_table_has_a_row_for_each_strategy():
    """Losses stand below it."""
    result = {
        "command": "c",
        "vllm": "v",
        "torch": "t",
        "date": "d",
        "machine": {"cores": 2, "cpu": "x"},
        "replicas": 2,
        "kv_tokens": 8192,
        "block_tokens": 32,
        "workloads": {"bursts": [one_round(0.6, 90.0)]},
    }
    text = rounds.block(result)
    row = "| bursts | `adaptive` | 0.600 | 0.60 | 0.60 | 90 ms | 0.90 x | 180 ms | 0.90 x |"
    assert row in text.splitlines()
    assert "Missed: bursts: 0.6 of the hits, wanted 0.9." in text
    assert "bursts (1 rounds) 0.60 to 0.60, 0.90 to 0.90 x and 0.90 to 0.90 x" in text
    assert len(text.splitlines()) == 2 + len(rounds.STRATEGIES) + 4


def test_added_rounds_go_behind_those_that_are_recorded(monkeypatch, tmp_path):
    """With the numbers, and so the requests, that come next; the first ones keep commit and date."""
    monkeypatch.setattr(rounds.rig, "RESULTS", tmp_path)
    monkeypatch.setattr(rounds.rig, "ROOT", tmp_path)
    monkeypatch.setattr(rounds.agreement, "has_priority", contextlib.nullcontext)
    installed = {"vllm": "v", "torch": "t"}
    monkeypatch.setattr(rounds.install, "prepare", lambda args: (None, None, installed))
    begun = []

    async def measure(python, model, names, count, running):
        begun.append(dict(names))
        return {name: [one_round(0.8, 90.0)] * count for name in names}

    monkeypatch.setattr(rounds, "measure", measure)
    for flags in (["--rounds", "2"], ["--rounds", "3", "--only", "bursts", "--add"]):
        monkeypatch.setattr(rounds.sys, "argv", ["rounds", *flags, "--write"])
        assert rounds.main() == 0
    assert begun == [
        {"shared prefixes": 0, "mixed lengths": 0, "bursts": 0, "adapters": 0},
        {"bursts": 2},
    ]
    result = json.loads((tmp_path / "real_vllm_rounds.json").read_text())
    counts = {name: len(figures) for name, figures in result["workloads"].items()}
    assert counts == {"shared prefixes": 2, "mixed lengths": 2, "bursts": 5, "adapters": 2}
    assert result["command"].endswith("rounds --rounds 2 --write")
    assert [more["command"] for more in result["added"]] == [
        "python -m bench.real_vllm.rounds --only bursts --rounds 3 --write --add"
    ]
    text = rounds.block(result)
    assert "Medians of 2 to 5 rounds." in text
    assert "more by `python -m bench.real_vllm.rounds --only bursts --rounds 3" in text


def test_time_in_engines_is_shown_beside_the_clients():
    """Queue and prefill; nothing where pages showed neither."""
    known = one_round(0.6, 90.0)
    known["adaptive"] |= {"engine_ms": {"queue": 5.0, "prefill": 25.0}, "ttft_mean_ms": 120.0}
    text = rounds.phases({"bursts": [known], "adapters": [one_round(0.6, 90.0)]})
    assert "engines: bursts 30 of 120 ms (medians)" in text
    assert not rounds.phases({"adapters": [one_round(0.6, 90.0)]})


def test_beliefs_are_held_against_equal_replicas():
    """Iterations of both, caches of both, and predicted tokens; runs without any are left out."""
    known = one_round(0.6, 90.0)
    known["adaptive"]["believed"] = {"step_ms": [10.0, 25.0], "capacity_tokens": [8000, 6000]}
    known["adaptive"]["prediction"] = {"predicted_tokens": 90, "found_tokens": 100}
    text = rounds.beliefs({"bursts": [known, one_round(0.6, 90.0)]})
    assert "factor of 2.50 apart (median, 2.50 at most)" in text
    assert "7000 tokens (median, 6000 to 8000)" in text
    assert "predicted 0.900 of" in text
    assert rounds.beliefs({"bursts": [one_round(0.6, 90.0)]}) == "No beliefs were recorded."
