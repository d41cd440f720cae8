"""Tests of the run with KV events of real engines, without vLLM."""

import json

from bench.real_vllm import capture, conversations, kv_events, replicas, tiny
from bench.real_vllm.counters import EngineAnswer


def turn(number, predicted, cached, status=200):
    decision = f"adaptive; chose=h:1; cost=1.0ms; cached={predicted}/500"
    answer = EngineAnswer(status=status, prompt_tokens=500, cached_tokens=cached, decision=decision)
    return conversations.ConversationTurn(number, answer)


def test_follow_up_turns_are_compared():
    """First turns count for the hit ratio only; a failed request counts as such."""
    turns = [
        turn(1, 0, 96),
        turn(2, 128, 128),
        turn(2, 160, 128),
        turn(3, 0, 128),
        turn(4, 0, 0, 503),
    ]
    figures = kv_events.figures(turns)
    assert (figures["requests"], figures["failed"], figures["follow_ups"]) == (5, 1, 3)
    assert (figures["equal_ratio"], figures["within_a_block_ratio"]) == (0.3333, 0.6667)
    assert figures["mean_absolute_error_tokens"] == 53.3
    assert len(figures["differences"]) == 2
    assert figures["hit_ratio"] == round((96 + 3 * 128) / 2500, 4)


def test_engines_publish_only_where_they_are_to(tmp_path):
    """On free ports of the loopback address, and with the paths that render."""
    model = tmp_path / "model"
    words = replicas.command(tmp_path, model, 8000, events=True, num_gpu_blocks_override=25)
    config = json.loads(words[words.index("--kv-events-config") + 1])
    assert config["enable_kv_cache_events"]
    assert config["endpoint"] == config["replay_endpoint"] == "tcp://*:0"
    assert "--enable-scale-out" in words
    assert words[words.index("--num-gpu-blocks-override") + 1] == "25"
    assert "--kv-events-config" not in replicas.command(tmp_path, model, 8000)


def test_the_capture_asks_for_what_it_shows():
    """Names are those that the tests of the capture look for; texts of equal starts are equal."""
    names = [step.name for step in capture.steps()]
    assert {"again", "copies its last block", "adapter", "salt", "chat"} < set(names)
    assert capture.text(1, 4) == capture.text(1, 4) != capture.text(2, 4)


def test_answers_are_of_words():
    """So that the next turn is tokenized as the answer was generated."""
    ids, _ = tiny.vocabulary()
    assert len(set(conversations.word_ids())) == len(tiny.WORDS)
    assert max(conversations.word_ids()) < len(ids)
