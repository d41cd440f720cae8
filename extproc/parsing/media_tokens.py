"""Prompt tokens of images, videos and audio, by family of models.

Every family cuts images in a way of its own. The rules have the defaults of their processors, whose
sources docs/concepts/media.md#tokens lists; what a deployment sets otherwise, and what a name does not
show, is corrected by the usage that engines report (`pool.media_correction`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

import msgspec

from extproc.request import MediaKind

#: Size of an image that cannot be read (pixels), of a frame of a video, and seconds of audio.
_USUAL_IMAGE: Final = (1024, 768)
_FRAME: Final = (640, 360)
_USUAL_S: Final = 30
#: Frames that vLLM takes of a video (`--media-io-kwargs`, `num_frames`).
_FRAMES: Final = 32


class _ImageRule(Protocol):
    """Tokens of an image of a width and a height in pixels, 1 to 65,535 each."""

    def __call__(self, width: int, height: int, /) -> int: ...


class _Grid(msgspec.Struct, frozen=True):
    """A token for each square of pixels, after the image was scaled into bounds."""

    side: int
    least: int
    most: int

    def __call__(self, width: int, height: int) -> int:
        side = self.side
        columns, rows = max(1, round(width / side)), max(1, round(height / side))
        scale = math.sqrt(self.side * self.side / (width * height))
        if columns * rows > self.most:
            scale *= math.sqrt(self.most)
            columns, rows = int(width * scale / side), int(height * scale / side)
        elif columns * rows < self.least:
            scale *= math.sqrt(self.least)
            columns, rows = math.ceil(width * scale / side), math.ceil(height * scale / side)
        return min(self.most, max(1, columns) * max(1, rows))


class _Rows(msgspec.Struct, frozen=True):
    """A token for each square of pixels of an image with a longest side, and for each row."""

    side: int
    longest: int

    def __call__(self, width: int, height: int) -> int:
        scale = max(1.0, max(width, height) / self.longest)
        columns = math.ceil(max(1, round(width / scale)) / self.side)
        return math.ceil(max(1, round(height / scale)) / self.side) * (columns + 1)


class _Fixed(msgspec.Struct, frozen=True):
    tokens: int

    def __call__(self, _width: int, _height: int) -> int:
        return self.tokens


def _shapes(most: int) -> Sequence[tuple[int, int]]:
    """Columns and rows of up to so many tiles, the fewest tiles first."""
    pairs = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most]
    return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair))


_TWELVE: Final = _shapes(12)
_SIXTEEN: Final = _shapes(16)


def _internvl(width: int, height: int) -> int:
    """Tiles of 448 pixels in the shape of the image; of equal shapes the larger if it is filled."""
    best, least = (1, 1), math.inf
    for shape in _TWELVE:
        difference = abs(width / height - shape[0] / shape[1])
        is_filled = width * height > 0.5 * 448 * 448 * shape[0] * shape[1]
        if difference < least or (difference == least and is_filled):
            best, least = shape, difference
    tiles = best[0] * best[1]
    return 256 * (tiles + (tiles > 1)) + 2


def _llama4(width: int, height: int) -> int:
    """Tiles of 336 pixels: the least enlargement that there is, else the least reduction."""
    scales = [(min(336 * i / width, 336 * j / height), (i, j)) for i, j in _SIXTEEN]
    larger = [scale for scale, _ in scales if scale >= 1.0]
    scale = min(larger) if larger else max(scale for scale, _ in scales)
    columns, rows = next(shape for known, shape in scales if known == scale)
    tiles = columns * rows
    # Start, the whole image and end; a separator behind each tile.
    return 144 + 3 + ((144 + 1) * tiles if tiles > 1 else 0)


_LLAVA_NEXT_SHAPES: Final = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))


def _llava_next(width: int, height: int) -> int:
    """Tiles of 336 pixels, 24 x 24 patches, that keep most of the image and waste least."""

    def fit_pixels(shape: tuple[int, int]) -> tuple[float, float]:
        scale = min(336 * shape[0] / width, 336 * shape[1] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - 336 * 336 * shape[0] * shape[1]

    columns, rows = max(_LLAVA_NEXT_SHAPES, key=fit_pixels)
    columns, rows = 24 * columns, 24 * rows
    if width / height > columns / rows:
        rows = max(1, round(height * columns / width))
    else:
        columns = max(1, round(width * rows / height))
    return 576 + rows * (columns + 1)


def _minicpm(width: int, height: int) -> int:
    slices = min(9, math.ceil(width * height / (448 * 448)))
    return (64 + 2) * (slices + (slices > 1))


class _Family(msgspec.Struct, frozen=True):
    """Rules of a family of models.

    Attributes:
        name: Matches names of models, in lower case.
        image: Tokens of an image.
        joined_frames: Frames of a video that are joined in time (count).
        audio_tokens_per_s: Tokens of a second of audio.
    """

    name: re.Pattern[str]
    image: _ImageRule
    joined_frames: int = 1
    audio_tokens_per_s: float = 12.5


def _family(
    name: str, image: _ImageRule, joined_frames: int = 1, audio_tokens_per_s: float = 12.5
) -> _Family:
    return _Family(re.compile(name), image, joined_frames, audio_tokens_per_s)


#: The first that matches counts.
_FAMILIES: Final = (
    _family(r"qwen-?3([-_]?(vl|omni)|\.[5-9])", _Grid(32, 64, 16_384), 2, 25.0),
    _family(r"qwen-?2(\.5)?[-_]?(vl|omni|audio)|mimo-vl|ui-tars", _Grid(28, 4, 16_384), 2, 25.0),
    _family(r"glm-?4\.?[0-9]?v", _Grid(28, 8, 7_500), 2),
    _family(r"kimi-?vl", _Grid(28, 1, 1_024)),
    _family(r"pixtral-?12b", _Rows(16, 1024)),
    _family(
        r"pixtral|mistral-small|mistral-medium|mistral-large-3|magistral|ministral-3",
        _Rows(28, 1540),
    ),
    _family(r"llava-?(v?1\.6|next)|llava-v1\.6", _llava_next),
    _family(r"llava-?(v?1\.5)", _Fixed(576)),
    _family(r"gemma-?3n", _Fixed(260), 1, 6.25),
    _family(r"gemma-?3|medgemma", _Fixed(260)),
    _family(r"llama-?4", _llama4),
    _family(r"intern-?vl|intern-?s1", _internvl),
    _family(r"minicpm-?[vo]", _minicpm),
)
#: Width times height by 1,024, as llm-d's `token-producer` counts any image.
_OTHER: Final = _family("", _Grid(32, 1, 4_096))


# Names are those of clients: only so many are remembered.
@lru_cache(maxsize=512)
def _find_family(model: str) -> _Family:
    lowered = model.lower()
    return next((family for family in _FAMILIES if family.name.search(lowered)), _OTHER)


@lru_cache(maxsize=4096)
def estimate(model: str, kind: MediaKind, size: tuple[int, int]) -> int:
    """Prompt tokens of an item, at least 1.

    Args:
        model: Name of a model; any other name is of an unknown family.
        kind: What it is.
        size: Width and height in pixels, or seconds and 0; zeros where it is unknown.
    """
    family = _find_family(model)
    if kind == "audio":
        return max(1, round((size[0] or _USUAL_S) * family.audio_tokens_per_s))
    if kind == "video":
        return _FRAMES // family.joined_frames * family.image(*_FRAME)
    width, height = size
    if not width or not height:
        width, height = _USUAL_IMAGE
    return family.image(width, height)
