"""Tokens of images by family, against counts of the families' own processors."""

import pytest

from extproc.parsing import media

#: Model, width, height, and tokens by its processor; sources as in docs/concepts/media.md.
COUNTS = [
    ("Qwen/Qwen2-VL-7B-Instruct", 1024, 768, 37 * 27),
    ("Qwen/Qwen2.5-VL-72B-Instruct", 8000, 6000, 110 * 147),
    ("qwen2.5-vl", 20, 20, 4),
    ("qwen2.5-vl", 13, 142, 7),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", 1024, 768, 32 * 24),
    ("Qwen/Qwen3.5-35B-A3B", 1024, 768, 32 * 24),
    ("Qwen/Qwen3-VL-8B", 100, 100, 64),
    ("google/gemma-3-27b-it", 4000, 300, 260),
    ("llava-hf/llava-1.5-7b-hf", 640, 480, 576),
    ("llava-hf/llava-v1.6-mistral-7b-hf", 672, 672, 576 + 48 * 49),
    ("llava-hf/llava-v1.6-mistral-7b-hf", 19, 39, 888),
    ("llava-hf/llava-v1.6-mistral-7b-hf", 69, 177, 840),
    ("llava-hf/llava-v1.6-mistral-7b-hf", 1920, 1080, 1948),
    ("mistral-community/pixtral-12b", 1024, 1024, 64 * 65),
    ("mistralai/Pixtral-12B-2409", 512, 512, 32 * 33),
    ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 1540, 1540, 55 * 56),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 336, 336, 147),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 672, 672, 4 * 145 + 147),
    ("OpenGVLab/InternVL3-8B", 448, 448, 258),
    ("OpenGVLab/InternVL2_5-8B", 896, 448, 3 * 256 + 2),
    ("openbmb/MiniCPM-V-2_6", 448, 448, 66),
    ("a name that says nothing", 1024, 1024, 1024),
    ("", 10_000, 10_000, 4096),
]


@pytest.mark.parametrize(("model", "width", "height", "tokens"), COUNTS)
def test_tokens_of_images(model, width, height, tokens):
    """The rule of a family counts what its processor counts."""
    assert media.estimate(model, "image", (width, height)) == tokens


def test_usual_sizes():
    """Without a size, an image has 1024 x 768 pixels, and audio takes 30 seconds."""
    assert media.estimate("qwen2-vl", "image", (0, 0)) == 37 * 27
    assert media.estimate("voxtral-mini", "audio", (0, 0)) == 375
    assert media.estimate("gemma-3n-e4b-it", "audio", (16, 0)) == 100
