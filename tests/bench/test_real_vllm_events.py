"""Tests of the run with KV events of real engines, without vLLM."""

import json

from bench.real_vllm import capture, conversations, kv_events, replicas, tiny, tiny_vision
from bench.real_vllm.counters import EngineAnswer
from tests.parsing.builders import CHAT, parsed


def turn(number, predicted, cached, status=200):
    decision = f"adaptive; chose=h:1; cost=1.0ms; cached={predicted}/500"
    answer = EngineAnswer(status=status, prompt_tokens=500, cached_tokens=cached, decision=decision)
    return conversations.ConversationTurn(number, answer)


def user_turn(part):
    return {"model": tiny_vision.NAME, "messages": [{"role": "user", "content": [part]}]}


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
    assert {"another image", "named", "after evictions"} < {s.name for s in capture.image_steps()}


def test_a_model_with_images_has_no_weights_and_no_adapters(tmp_path):
    """Tokens of images come behind those of the model of texts, whose ids stay."""
    model = tiny_vision.build(tmp_path)
    words = replicas.command(tmp_path, model, 8000, images=True)
    assert words[-2:] == ["--load-format", "dummy"]
    assert "--enable-lora" not in words
    tokens = json.loads((model / "tokenizer.json").read_text())
    ids, _ = tiny.vocabulary()
    assert ids.items() < tokens["model"]["vocab"].items()
    config = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == len(tokens["model"]["vocab"]) == config["video_token_id"] + 1


def test_images_are_of_the_size_that_is_asked_for():
    """And other seeds are other images."""
    part, other = tiny_vision.image(300, 200, 1), tiny_vision.image(300, 200, 2)
    (item,) = parsed(CHAT, user_turn(part)).media
    assert (item.tokens, item.is_sized) == (77, True)
    assert part != other


def test_answers_are_of_words():
    """So that the next turn is tokenized as the answer was generated."""
    ids, _ = tiny.vocabulary()
    assert len(set(conversations.word_ids())) == len(tiny.WORDS)
    assert max(conversations.word_ids()) < len(ids)
