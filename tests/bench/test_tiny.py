"""The files of the tiny model, without vLLM."""

import json
import random
import struct
from itertools import pairwise

from bench.real_vllm import tiny
from extproc.simulator import prompt


def test_a_tensor_has_the_size_its_config_says():
    """Every tensor of the model follows from the configuration."""
    config, weights = tiny.config(), tiny.weights()
    hidden, head = config["hidden_size"], config["head_dim"]
    assert weights["model.embed_tokens.weight"] == (config["vocab_size"], hidden)
    assert weights["model.layers.1.self_attn.q_proj.weight"] == (
        config["num_attention_heads"] * head,
        hidden,
    )
    assert weights["model.layers.1.self_attn.k_proj.weight"] == (
        config["num_key_value_heads"] * head,
        hidden,
    )
    assert weights["model.layers.0.mlp.down_proj.weight"] == (hidden, config["intermediate_size"])
    assert len(weights) == 3 + 9 * config["num_hidden_layers"]


def test_heads_are_as_wide_as_the_cpu_backend_takes():
    """Other widths start and die at the first request."""
    assert tiny.config()["head_dim"] in {32, 64, 80, 96, 112, 128}


def test_an_adapter_changes_what_its_config_names():
    """A and B of every target and layer, with the rank between them."""
    weights, config = tiny.adapter_weights(), tiny.adapter_config()
    assert len(weights) == 2 * 2 * len(config["target_modules"])
    for name, shape in weights.items():
        base = tiny.weights()[
            name.replace("base_model.model.", "", 1).replace(".lora_A", "").replace(".lora_B", "")
        ]
        wanted = (config["r"], base[1]) if "lora_A" in name else (base[0], config["r"])
        assert shape == wanted


def test_a_safetensors_file_reads_back():
    """Length, header and data fit each other; norms are ones."""
    content = tiny.safetensors({"a.weight": (3, 5), "norm.weight": (4,)}, random.Random(0))
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    assert length % 8 == 0
    assert header["a.weight"] == {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}
    begin, end = header["norm.weight"]["data_offsets"]
    assert end == len(data)
    assert data[begin:end] == bytes.fromhex("803f") * 4


def test_numbers_become_the_upper_half_of_a_float32():
    """1, -2 and 0.15625 in bfloat16, little end first."""
    assert tiny.bfloat16([1.0, -2.0, 0.15625]) == bytes.fromhex("803f00c0203e")


def test_every_word_is_one_token():
    """Applying the merges to a word's bytes leaves the word."""
    tokens, merges = tiny.vocabulary()
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    letters = tiny.byte_letters()
    for word in tiny.WORDS:
        pieces = [letters[byte] for byte in word.encode()]
        while pairs := [pair for pair in pairwise(pieces) if pair in ranks]:
            at = list(pairwise(pieces)).index(min(pairs, key=ranks.__getitem__))
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        assert len(pieces) == 1
        assert pieces[0] in tokens


def test_token_ids_have_no_gap():
    """The vocabulary is as large as the embedding."""
    tokens, _ = tiny.vocabulary()
    assert sorted(tokens.values()) == list(range(tiny.config()["vocab_size"]))


def test_a_word_is_one_token_to_the_simulated_engine_too():
    """Four bytes with the space: real and simulated prompts are equally long."""
    assert {prompt.count(word.encode()) for word in tiny.WORDS} == {1}


def test_a_model_is_built_the_same_twice(tmp_path):
    """The same seed writes the same bytes; adapters differ from each other."""
    first, other = tiny.build(tmp_path / "one"), tiny.build(tmp_path / "other")
    names = sorted(path.name for path in first.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert all((first / name).read_bytes() == (other / name).read_bytes() for name in names)
    adapters = [(first.parent / name / "adapter_model.safetensors") for name in tiny.ADAPTERS]
    assert adapters[0].read_bytes() != adapters[1].read_bytes()
