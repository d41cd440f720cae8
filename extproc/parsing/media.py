"""Media in prompts: images, videos and audio in content parts, their sizes and their tokens.

The stable bytes of a prompt have one field for each item, behind the part that holds it: its kind, its
size, and the bytes of JSON that stand for nothing but it. `lay_out` gives it the room of the tokens that
it takes, four bytes each, so that blocks of bytes are blocks of tokens: prompts that share an image and
ask something else share the blocks of the image.

Sizes are read from headers of PNG, JPEG, GIF, WebP and WAV in base64, a few bytes of it. What is no such
header, or claims more pixels than its bytes can hold, has no size.

Every family of models cuts images in a way of its own. The rules have the defaults of their processors,
whose sources docs/concepts/media.md#tokens lists; what a deployment sets otherwise, and what a name does
not show, is corrected by the usage that engines report (`pool.media_correction`).
"""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from extproc.request import BYTES_PER_TOKEN, MAX_NAME_BYTES, MediaKind, MediaSpan

#: Starts the field of an item.
MARKER: Final = b"\xf7"

#: Items of a prompt that are counted (count): vLLM takes no more than 999 of a kind by default. The
#: first of them have spans of their own, and the last span has the tokens of all others.
MAX_ITEMS: Final = 1024
MAX_SPANS: Final = 256
#: Bytes of all items of a prompt at most, as they are laid out: 131,072 tokens.
MAX_ROOM_BYTES: Final = 512 * 1024

#: Kinds by type of content part, in OpenAI's two APIs, in Anthropic's, and in vLLM's extensions.
KINDS: Final[Mapping[str, MediaKind]] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
}
#: Keys by which vLLM tells the type of a part that has none, in its order.
_TYPE_KEYS: Final = (
    *("image_url", "image_pil", "image_embeds"),
    *("audio_url", "input_audio", "video_url"),
)
#: Keys under which a part holds its item, where it is not its type.
_ITEM_KEYS: Final = {"input_image": "image_url", "input_video": "video_url", "image": "source"}

_LETTERS: Final[Mapping[MediaKind, bytes]] = {"image": b"i", "video": b"v", "audio": b"a"}
_BY_LETTER: Final = {letter: kind for kind, letter in _LETTERS.items()}
_FIELD: Final = re.compile(rb"\xf7([iva])(\d{1,5}),(\d{1,5}),(\d{1,9});")
_UNKNOWN_FIELDS: Final = {kind: b"\xf7%b0,0,0;" % letter for kind, letter in _LETTERS.items()}

#: Characters of a data URL in which its base64 begins.
_LONGEST_HEAD: Final = 256
#: First bytes of a file that are read, and the characters of base64 that they take.
_HEAD_BYTES: Final = 32
_SHORTEST: Final = 43
#: Longest side of an image (pixels): a JPEG has no longer one.
_LONGEST_SIDE: Final = 65_535
#: Pixels of an image for each of its bytes at most. A blank screenshot has some 300, a photo ten.
_PIXELS_PER_BYTE: Final = 1024
#: Segments of a JPEG before its size (count): EXIF, color profiles of 64 KiB each, tables.
_MAX_SEGMENTS: Final = 64
#: Bytes of audio in a second where its header does not say: 128 kbit/s.
_AUDIO_BYTES_PER_S: Final = 16_000
#: Longest audio (seconds).
_LONGEST_S: Final = 3600

#: Headers of llm-d with seconds, frames per second, and WIDTHxHEIGHT of the videos of a request.
VIDEO_DURATION: Final = "x-llm-d-video-duration-seconds"
VIDEO_FPS: Final = "x-llm-d-video-fps"
VIDEO_RESOLUTION: Final = "x-llm-d-video-resolution"
_DECIMAL: Final = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_RESOLUTION: Final = re.compile(r"([0-9]{1,5})[xX]([0-9]{1,5})")
#: Frames per second where only the seconds are known, as upstream.
_USUAL_FPS: Final = 24.0
#: Tokens of a frame at most, whatever a header claims: processors of videos shrink frames to this of
#: 28 x 28 pixels each (Qwen's `VIDEO_MAX_PIXELS`).
_MAX_FRAME_TOKENS: Final = 768

#: Size of an item: width and height in pixels, or seconds and 0.
Size = tuple[int, int]
_UNKNOWN: Final[Size] = (0, 0)


def add_type(part: dict[str, Any]) -> dict[str, Any]:
    """A content part without a type, with the one that its keys tell, in the place that clients use."""
    key = next((key for key in _TYPE_KEYS if key in part), None)
    return part if key is None else {"type": None, **part} | {"type": key}


def field(part: Mapping[str, Any], kind: MediaKind) -> bytes:
    """The field of a content part that is an item, without the JSON before it."""
    payload = _payload(part)
    if kind == "video" or not payload:
        return _UNKNOWN_FIELDS[kind]
    size = _size(kind, payload)
    if size == _UNKNOWN:
        return _UNKNOWN_FIELDS[kind]
    return b"\xf7%b%d,%d,0;" % (_LETTERS[kind], *size)


def with_json_bytes(written: bytes, count: int) -> bytes:
    """A field with the bytes before it that stand for nothing but its item."""
    return written[:-2] + b"%d;" % count


def _payload(part: Mapping[str, Any]) -> str:
    """The URL or the base64 of an item; empty for none."""
    kind = part["type"]
    value = part.get(_ITEM_KEYS.get(kind, kind)) or part.get(kind)
    if type(value) is dict:
        value = value.get("url") or value.get("data")
    return value if type(value) is str else ""


def _size(kind: MediaKind, payload: str) -> Size:
    """Size of an item; zeros for an unknown one."""
    start = 0
    if len(payload) < _SHORTEST or payload.startswith("http"):
        return _UNKNOWN
    if payload.startswith("data:"):
        # A client's own text before the comma is not searched any further.
        comma = payload.find(",", 0, _LONGEST_HEAD)
        if comma < 0 or not payload.endswith(";base64", 0, comma):
            return _UNKNOWN
        start = comma + 1
    num_bytes = (len(payload) - start) // 4 * 3
    head = _read(payload, start, 0, _HEAD_BYTES)
    if kind == "audio":
        return _audio_s(head, num_bytes), 0
    width, height = _image_size(head, payload, start)
    if max(width, height) > _LONGEST_SIDE or not 0 < width * height <= _PIXELS_PER_BYTE * num_bytes:
        return _UNKNOWN
    return width, height


def _read(text: str, start: int, offset: int, count: int) -> bytes:
    """Bytes at an offset in the base64 from `start` on, fewer at its end; none without base64."""
    begin = start + offset // 3 * 4
    try:
        decoded = binascii.a2b_base64(text[begin : begin + (count // 3 + 2) * 4])
    except ValueError:  # also for characters beyond ASCII
        return b""
    skipped = offset % 3
    return decoded[skipped : skipped + count]


def _image_size(head: bytes, text: str, start: int) -> Size:
    """Width and height in pixels as the header has them; zeros for an unknown format."""
    if len(head) < _HEAD_BYTES:
        return _UNKNOWN
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg_size(text, start)
    if head.startswith((b"GIF87a", b"GIF89a")):
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp_size(head)
    return _UNKNOWN


def _jpeg_size(text: str, start: int) -> Size:
    """Size in the first frame header, which follows other segments."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        segment = _read(text, start, at, 9)
        if len(segment) < 9 or segment[0] != 0xFF:
            break
        marker = segment[1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(segment[7:9]), int.from_bytes(segment[5:7])
        # Fill bytes may precede a marker; start of scan follows the frame header.
        if marker == 0xDA:
            break
        at += 1 if marker == 0xFF else 2 + int.from_bytes(segment[2:4])
    return _UNKNOWN


def _webp_size(head: bytes) -> Size:
    """Size in the first chunk: lossy, lossless or extended."""
    chunk = head[12:16]
    if chunk == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = head[26:28], head[28:30]
        return int.from_bytes(width, "little") & 0x3FFF, int.from_bytes(height, "little") & 0x3FFF
    if chunk == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    return _UNKNOWN


def _audio_s(head: bytes, num_bytes: int) -> int:
    """Seconds of audio, by the rate in the header of WAV, else by its bytes; at least 1."""
    rate = 0
    if head.startswith(b"RIFF") and head[8:16] == b"WAVEfmt ":
        rate = int.from_bytes(head[28:32], "little")
    return max(1, min(_LONGEST_S, num_bytes // (rate or _AUDIO_BYTES_PER_S)))


class VideoSize(NamedTuple):
    """Size of the videos of a request.

    Attributes:
        frame: Width and height in pixels.
        frames: Frames of which an engine takes tokens (count).
    """

    frame: Size = (640, 360)
    frames: int = 32


#: What is not known of a video. 32 frames are what vLLM takes of it (`--media-io-kwargs`, `num_frames`).
USUAL_VIDEO: Final = VideoSize()


def video_size(headers: Mapping[str, str]) -> VideoSize:
    """Size of videos by the headers of llm-d, in lower case; malformed ones are not believed."""
    frame, frames = USUAL_VIDEO
    sides = _RESOLUTION.fullmatch(headers.get(VIDEO_RESOLUTION, ""))
    if sides is not None and int(sides[1]) and int(sides[2]):
        frame = int(sides[1]), int(sides[2])
    seconds, rate = (
        _DECIMAL.fullmatch(headers.get(name, "")) for name in (VIDEO_DURATION, VIDEO_FPS)
    )
    if seconds is not None:
        per_s = float(rate[0]) if rate is not None else _USUAL_FPS
        frames = min(frames, max(1, int(float(seconds[0]) * per_s)))
    return VideoSize(frame, frames)


def lay_out(
    prompt: bytes, model: str, video: VideoSize = USUAL_VIDEO
) -> tuple[bytes, tuple[MediaSpan, ...], int]:
    """Give the items of a prompt the room of their tokens.

    It goes by the request, and by nothing that is learned: equal prompts stay equal.

    Args:
        prompt: Stable bytes with fields of items.
        model: Model that the body names, of any length; empty for none.
        video: Size of all videos.

    Returns:
        The prompt, its items, and the bytes of all else in it.
    """
    pieces: list[bytes | memoryview] = []
    spans: list[MediaSpan] = []
    copied = text_bytes = num_bytes = room_bytes = more_tokens = num_more = 0
    view = memoryview(prompt)
    model = model[:MAX_NAME_BYTES]
    for match in islice(_FIELD.finditer(prompt), MAX_ITEMS):
        kind = _BY_LETTER[match[1]]
        size, json_bytes = (int(match[2]), int(match[3])), int(match[4])
        tokens = estimate(model, kind, size, video)
        if len(spans) == MAX_SPANS:
            more_tokens += tokens
            num_more += 1
            continue
        start, end = max(copied, match.start() - json_bytes), match.end()
        room = max(0, BYTES_PER_TOKEN * tokens - (end - start))
        room = min(room, MAX_ROOM_BYTES - room_bytes)
        pieces += (view[copied:end], b" " * room)
        at = num_bytes + start - copied
        text_bytes += start - copied
        num_bytes = at + end - start + room
        room_bytes += room
        copied = end
        spans.append(
            MediaSpan(
                kind,
                at,
                num_bytes - at,
                tokens,
                is_sized=video != USUAL_VIDEO if kind == "video" else size != _UNKNOWN,
                digest=xxhash.xxh3_64_intdigest(view[start:end]) if json_bytes else 0,
            )
        )
    if num_more:
        last = spans[-1]
        spans[-1] = msgspec.structs.replace(
            last, tokens=last.tokens + more_tokens, count=1 + num_more
        )
    pieces.append(view[copied:])
    return b"".join(pieces), tuple(spans), text_bytes + len(prompt) - copied


#: Size of an image that cannot be read (pixels), and seconds of audio.
_USUAL_IMAGE: Final = (1024, 768)
_USUAL_S: Final = 30


#: Tokens of an image of a width and a height in pixels, 1 to 65,535 each.
_ImageRule = Callable[[int, int], int]


class _Grid(msgspec.Struct, frozen=True):
    """A token for each square of pixels, after the image was scaled into bounds."""

    side: int
    least: int
    most: int

    def __call__(self, width: int, height: int) -> int:
        side = self.side
        columns, rows = round(width / side), round(height / side)
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


def _fixed(tokens: int) -> _ImageRule:
    return lambda _width, _height: tokens


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


#: Columns and rows; of equally good ones the first counts.
_LLAVA_NEXT_SHAPES: Final = ((2, 1), (1, 2), (2, 2), (1, 3), (3, 1))


#: What a count of patches may be below a whole number by rounding.
_LLAVA_NEXT_ERROR: Final = 5e-8


def _llava_next(width: int, height: int) -> int:
    """Tiles of 336 pixels, 24 x 24 patches, that keep most of the image and waste least."""

    def fit_pixels(shape: tuple[int, int]) -> tuple[float, float]:
        scale = min(336 * shape[0] / width, 336 * shape[1] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - 336 * 336 * shape[0] * shape[1]

    columns, rows = max(_LLAVA_NEXT_SHAPES, key=fit_pixels)
    columns, rows = 24 * columns, 24 * rows
    # Borders are left out in pairs, as many above as below.
    if width / height > columns / rows:
        rows -= (rows - int(height * columns / width + _LLAVA_NEXT_ERROR)) // 2 * 2
    else:
        columns -= (columns - int(width * rows / height + _LLAVA_NEXT_ERROR)) // 2 * 2
    return 576 + rows * (columns + 1)


def _minicpm(width: int, height: int) -> int:
    slices = min(9, math.ceil(width * height / (448 * 448)))
    return (64 + 2) * (slices + (slices > 1))


class _Family(msgspec.Struct, frozen=True):
    """Rules of a family of models.

    Attributes:
        name: Pattern of names of models, in lower case.
        joined_frames: Frames of a video that are joined in time (count).
    """

    name: str
    image: _ImageRule
    joined_frames: int = 1
    audio_tokens_per_s: float = 12.5


#: The first that matches counts.
_FAMILIES: Final = (
    _Family(r"qwen-?3([-_]?(vl|omni)|\.[5-9])", _Grid(32, 64, 16_384), 2, 25.0),
    _Family(r"qwen-?2(\.5)?[-_]?(vl|omni|audio)|mimo-vl|ui-tars", _Grid(28, 4, 16_384), 2, 25.0),
    _Family(r"glm-?4\.?[0-9]?v", _Grid(28, 8, 7_500), 2),
    _Family(r"kimi-?vl", _Grid(28, 1, 1_024)),
    _Family(r"pixtral-?12b", _Rows(16, 1024)),
    _Family(
        r"pixtral|mistral-small|mistral-medium|mistral-large-3|magistral|ministral-3",
        _Rows(28, 1540),
    ),
    _Family(r"llava-?(v?1\.6|next)|llava-v1\.6", _llava_next),
    _Family(r"llava-?(v?1\.5)", _fixed(576)),
    _Family(r"gemma-?3n", _fixed(260), 1, 6.25),
    _Family(r"gemma-?3|medgemma", _fixed(260)),
    _Family(r"llama-?4", _llama4),
    _Family(r"intern-?vl|intern-?s1", _internvl),
    _Family(r"minicpm-?[vo]", _minicpm),
)
#: Width times height by 1,024, as llm-d's `token-producer` counts any image.
_OTHER: Final = _Family("", _Grid(32, 1, 4_096))


# Names are those of clients: only so many are remembered.
@lru_cache(maxsize=512)
def _find_family(model: str) -> _Family:
    lowered = model.lower()
    return next((family for family in _FAMILIES if re.search(family.name, lowered)), _OTHER)


@lru_cache(maxsize=4096)
def estimate(
    model: str, kind: MediaKind, size: tuple[int, int], video: VideoSize = USUAL_VIDEO
) -> int:
    """Prompt tokens of an item, at least 1.

    Args:
        model: Name of a model; any other name is of an unknown family.
        size: Width and height in pixels, or seconds and 0; zeros where it is unknown.
        video: Size of a video.
    """
    family = _find_family(model)
    if kind == "audio":
        return max(1, round((size[0] or _USUAL_S) * family.audio_tokens_per_s))
    if kind == "video":
        joined = -(-video.frames // family.joined_frames)
        return joined * min(_MAX_FRAME_TOKENS, family.image(*video.frame))
    width, height = size
    if not width or not height:
        width, height = _USUAL_IMAGE
    return family.image(width, height)
