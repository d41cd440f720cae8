"""A tiny random Llama, its tokenizer, its chat template and LoRA adapters, written with the
standard library alone: the same files everywhere, and nothing to download.

Limits of vLLM's CPU attention (0.32): head_dim must be 32, 64, 80, 96, ... (16 starts and dies at
the first request) and KV blocks a multiple of 32 tokens.
"""

from __future__ import annotations

import array
import json
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

ADAPTERS = ("lora-a", "lora-b")
#: Adapter rank and the projections it changes.
RANK = 8
_TARGETS = ("q_proj", "v_proj")

#: Words of a space and three letters. Each is one token here and, having 4 bytes, in the simulated
#: engine and in the picker's estimate.
WORDS = tuple(f" {a}{b}{c}" for a in "bdfklmrt" for b in "aeio" for c in "gnpsvxyz")
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

#: As the simulated engine renders a conversation.
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the model.

    Attributes:
        hidden: Width of the residual stream.
        layers: Transformer layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        inner: Width of the feed-forward layer.
        positions: Longest context.
    """

    hidden: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    inner: int = 256
    positions: int = 8192


SHAPE = Shape()


def vocabulary() -> tuple[dict[str, int], list[str]]:
    """Tokens by their ids, and the merges that make a word of its bytes."""
    tokens = [*SPECIAL, *byte_letters().values()]
    merges: list[str] = []
    space = byte_letters()[ord(" ")]
    for word in WORDS:
        piece = space
        for letter in word[1:]:
            merge = f"{piece} {letter}"
            piece += letter
            if piece not in tokens:
                tokens.append(piece)
                merges.append(merge)
    return {token: number for number, token in enumerate(tokens)}, merges


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return letters


def tokenizer() -> dict[str, Any]:
    """`tokenizer.json`."""
    tokens, merges = vocabulary()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": tokens[word], "content": word, **flags, "special": True} for word in SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": tokens,
            "merges": merges,
        },
    }


def config(shape: Shape = SHAPE) -> dict[str, Any]:
    """`config.json`."""
    tokens, _ = vocabulary()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": len(tokens),
        "bos_token_id": None,
        "eos_token_id": tokens["<|end|>"],
        "torch_dtype": "bfloat16",
    }


def weights(shape: Shape = SHAPE) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors."""
    tokens, _ = vocabulary()
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(tokens), shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (len(tokens), shape.hidden),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (shape.hidden,),
            f"{at}.post_attention_layernorm.weight": (shape.hidden,),
            f"{at}.self_attn.q_proj.weight": (queries, shape.hidden),
            f"{at}.self_attn.k_proj.weight": (keys, shape.hidden),
            f"{at}.self_attn.v_proj.weight": (keys, shape.hidden),
            f"{at}.self_attn.o_proj.weight": (shape.hidden, queries),
            f"{at}.mlp.gate_proj.weight": (shape.inner, shape.hidden),
            f"{at}.mlp.up_proj.weight": (shape.inner, shape.hidden),
            f"{at}.mlp.down_proj.weight": (shape.hidden, shape.inner),
        }
    return shapes


def adapter_weights(shape: Shape = SHAPE) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an adapter's tensors, as peft writes them."""
    widths = {"q_proj": shape.heads * shape.head_dim, "v_proj": shape.kv_heads * shape.head_dim}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.layers):
        for target in _TARGETS:
            at = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            shapes[f"{at}.lora_A.weight"] = (RANK, shape.hidden)
            shapes[f"{at}.lora_B.weight"] = (widths[target], RANK)
    return shapes


def adapter_config() -> dict[str, Any]:
    """`adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "target_modules": list(_TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def bfloat16(numbers: Sequence[float]) -> bytes:
    """Little-endian bfloat16: the upper halves of the float32, cut, not rounded."""
    floats = array.array("f", numbers)
    if sys.byteorder == "big":
        floats.byteswap()
    wide = floats.tobytes()
    cut = bytearray(len(wide) // 2)
    cut[0::2], cut[1::2] = wide[2::4], wide[3::4]
    return bytes(cut)


def safetensors(tensors: Mapping[str, tuple[int, ...]], rng: random.Random) -> bytes:
    """A safetensors file of random bfloat16: length, JSON header, data; norms are 1.

    Args:
        tensors: Shapes by name.
        rng: Of the values, which are normal with a deviation of 0.05.
    """
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    data: list[bytes] = []
    begin = 0
    for name, shape in tensors.items():
        count = 1
        for size in shape:
            count *= size
        flat = name.endswith("norm.weight")
        data.append(bfloat16([1.0 if flat else rng.gauss(0.0, 0.05) for _ in range(count)]))
        end = begin + 2 * count
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data must begin at a multiple of 8
    return b"".join([struct.pack("<Q", len(text)), text, *data])


def build(folder: Path, *, seed: int = 0) -> Path:
    """Write the model and, beside it, its adapters.

    Args:
        folder: Where to; made if missing.
        seed: Of all weights.

    Returns:
        The folder of the model; adapters are in folders of their names beside it.
    """
    rng = random.Random(seed)
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "model.safetensors").write_bytes(safetensors(weights(), rng))
    end = SPECIAL[0]
    files = {
        "config.json": config(),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end,
            "model_max_length": SHAPE.positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
        "generation_config.json": {"eos_token_id": config()["eos_token_id"]},
    }
    for name, content in files.items():
        (model / name).write_text(json.dumps(content, indent=1) + "\n")
    for adapter in ADAPTERS:
        place = folder / adapter
        place.mkdir(exist_ok=True)
        (place / "adapter_config.json").write_text(json.dumps(adapter_config(), indent=1) + "\n")
        (place / "adapter_model.safetensors").write_bytes(safetensors(adapter_weights(), rng))
    return model
