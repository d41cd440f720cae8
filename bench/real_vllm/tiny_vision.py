"""A tiny Qwen2-VL, as `tiny` with images, without weights (vLLM has `--load-format dummy`); and images."""

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from bench.real_vllm import tiny

#: What engines call it: pickers know the family by the name.
NAME = "qwen2-vl-tiny"

#: Tokens around an image, in its place and in a video's.
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

#: Pixels of a patch (each way), patches of a token (each way), and pixels of an image at least and
#: at most: as the published models, but for the last, so that no test image takes long.
PATCH, MERGE = 14, 2
MIN_PIXELS, MAX_PIXELS = 56 * 56, 1280 * 28 * 28

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def token_ids() -> dict[str, int]:
    """Ids of all tokens: those of `tiny`, and behind them those of images."""
    tokens, _ = tiny.vocabulary()
    return tokens | {word: len(tokens) + n for n, word in enumerate(SPECIAL)}


def config() -> dict[str, Any]:
    """`config.json`."""
    tokens, text = token_ids(), tiny.config()
    third = text["head_dim"] // 2 // 4
    return text | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": len(tokens),
        "rope_scaling": {"type": "mrope", "mrope_section": [third * 2, third, third]},
        "vision_start_token_id": tokens[SPECIAL[0]],
        "vision_end_token_id": tokens[SPECIAL[1]],
        "image_token_id": tokens[SPECIAL[2]],
        "video_token_id": tokens[SPECIAL[3]],
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 1,
            "embed_dim": 64,
            "hidden_size": text["hidden_size"],
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
    }


def processor(kind: str) -> dict[str, Any]:
    """`preprocessor_config.json`, or that of videos."""
    return {
        f"{kind}_processor_type": f"Qwen2VL{kind.title()}Processor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def image(width: int, height: int, seed: int) -> dict[str, Any]:
    """Content part with a PNG of stripes, as high as a token, in colors by the seed."""
    rng, side = random.Random(seed), PATCH * MERGE
    colors = [rng.randbytes(3) for _ in range(-(-height // side))]
    rows = b"".join(b"\0" + colors[row // side] * width for row in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def build(folder: Path) -> Path:
    """Write the model; returns its folder."""
    model = folder / "vision"
    model.mkdir(parents=True, exist_ok=True)
    tokens, end = token_ids(), tiny.SPECIAL[0]
    tokenizer = tiny.tokenizer()
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [like | {"id": tokens[w], "content": w} for w in SPECIAL]
    tokenizer["model"]["vocab"] = tokens
    files = {
        "config.json": config(),
        "preprocessor_config.json": processor("image"),
        "video_preprocessor_config.json": processor("video"),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end,
            "model_max_length": tiny.SHAPE.positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
            "processor_class": "Qwen2VLProcessor",
        },
        "generation_config.json": {"eos_token_id": tokens[end]},
    }
    for name, content in files.items():
        (model / name).write_text(json.dumps(content, indent=1) + "\n")
    return model
