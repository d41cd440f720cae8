"""Images, videos and audio: their sizes, their tokens, and their room in prompts."""

import json
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.parsing import canonical_prompt, media, surfaces
from extproc.prefix_cache import blocks
from extproc.request import HttpRequest
from tests.parsing.builders import CHAT, chat, parsed, user
from tests.support import pictures
from tests.support.pictures import gif, jpeg, png, segment, url, wav, webp
from tests.support.seeded import examples

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct"


def image(data, mime="image/png"):
    return {"type": "image_url", "image_url": {"url": url(data, mime)}}


def text(words):
    return {"type": "text", "text": words}


def ask(*parts, model=QWEN):
    request = chat(user(list(parts)), model=model)
    assert request.stable_bytes == len(request.prompt)
    return request


def chain(request):
    return blocks.chain(request.prompt, blocks.seed(request.model))


FORMATS = {
    "png": png,
    "gif": gif,
    "jpeg": jpeg,
    "webp": webp,
    "lossy webp": lambda width, height: webp(width, height, kind="VP8 "),
    "lossless webp": lambda width, height: webp(width, height, kind="VP8L"),
    "jpeg with profiles": lambda width, height: jpeg(
        width, height, before=segment(0xE1, 65_535) + segment(0xE2, 65_534) + segment(0xDB, 67)
    ),
    "jpeg with fill bytes": lambda width, height: jpeg(width, height, before=b"\xff\xff\xff"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [(1024, 768), (333, 1), (1920, 1080)])
def test_sizes_of_images(name, size):
    """Width and height are read of every format, wherever its header has them."""
    item = ask(image(FORMATS[name](*size))).media[0]
    assert item.is_sized
    assert item.tokens == media.estimate(QWEN, "image", size)


SURFACES = {
    "chat": (CHAT, "messages", image),
    "responses": (
        "/v1/responses",
        "input",
        lambda data: {"type": "input_image", "image_url": url(data)},
    ),
    "messages": (
        "/v1/messages",
        "messages",
        lambda data: {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": pictures.encoded(data)},
        },
    ),
    "result": (
        "/v1/messages",
        "messages",
        lambda data: {"type": "tool_result", "content": [SURFACES["messages"][2](data)]},
    ),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_images_are_counted_on_every_surface(surface):
    """An image of 37 x 27 squares is 999 tokens, whatever bytes it has."""
    path, field, part = SURFACES[surface]
    for size in (5_000, 500_000):
        request = parsed(path, {"model": QWEN, field: [user([part(png(1024, 768, size=size))])]})
        assert [item.tokens for item in request.media] == [999]
        assert request.prompt_tokens == request.prompt_bytes // 4 + 999
        assert request.prompt_bytes < 200
        assert 4 * 999 <= len(request.prompt) < 4 * 999 + 200


@pytest.mark.parametrize("kind", ["image_url", "image_embeds", "video_url", "input_audio"])
def test_parts_without_a_type_go_by_their_key(kind):
    """A part without a type counts as the one that its key tells, as in vLLM."""
    item = {kind: {"url": url(png(1024, 768))}}
    typed, untyped = ask({"type": kind, **item}), ask(item)
    assert (untyped.media, untyped.prompt_tokens) == (typed.media, typed.prompt_tokens)
    assert ask({"type": None, **item}).prompt == typed.prompt
    assert not ask({"type": "x", **item}).media
    assert not ask({"type": "tool_use", "input": item}).media


def test_text_is_counted_beside_images():
    """Text has the tokens that it has alone."""
    words = "four words of text " * 20
    alone = chat(user([text(words)]))
    assert ask(image(png(1024, 768)), text(words)).prompt_tokens == alone.prompt_tokens + 999


@pytest.mark.parametrize(
    "address", ["https://a.example/cat.png", "data:image/svg+xml,%3Csvg/%3E", "file:///x.png", ""]
)
def test_images_that_cannot_be_read_are_of_a_usual_size(address):
    """A URL says nothing of its image: it counts as one of 1024 x 768 pixels."""
    item = ask({"type": "image_url", "image_url": {"url": address}}).media[0]
    assert not item.is_sized
    assert item.tokens == 999


@pytest.mark.parametrize(
    "data",
    [
        png(65_535, 65_535),
        png(2**31, 1),
        png(0, 100),
        jpeg(0, 0),
        jpeg(100, 100, before=segment(0xE1, 2) * 100),
        jpeg(100, 100, before=b"\xff\xe1\0\0\0"),
        jpeg(100, 100, before=b"\xff\xda\0\x02"),
        webp(16_777_216, 1),
        b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
        b"RIFF\0\0\0\0WEBPVP8 " + b"\0" * 100,
        b"\xff\xd8\xff",
        b"",
    ],
)
def test_headers_that_cannot_be_are_not_believed(data):
    """More pixels than the bytes can hold, none at all, and broken headers: of a usual size."""
    item = ask(image(data)).media[0]
    assert not item.is_sized
    assert item.tokens == 999


MAGIC = st.sampled_from(
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe1\0\x02",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBPVP8 ",
        b"RIFF\0\0\0\0WEBPVP8L",
        b"RIFF\0\0\0\0WEBPVP8X",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"",
    ]
)


@settings(max_examples=examples(200), deadline=None)
@given(
    MAGIC,
    st.binary(max_size=200),
    st.sampled_from(["", "\n", "=", "é", "\ud800", "%"]),
    st.integers(0, 60),
    st.sampled_from(["image_url", "input_audio", "image", "video_url"]),
)
def test_any_header_has_a_size(magic, rest, noise, at, kind):
    """Whatever a header says, an item has tokens within bounds, and its part stays digested."""
    written = pictures.encoded(magic + rest)
    written = written[:at] + noise + written[at:]
    part = {"type": kind, kind: {"url": "data:x;base64," + written}}
    written_field = media.field(part, media.KINDS[kind])
    laid_out, spans, _ = media.lay_out(written_field, QWEN)
    assert len(spans) == 1
    assert 1 <= spans[0].tokens <= 100_000
    assert laid_out.startswith(written_field)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 65_535), st.integers(1, 65_535), st.sampled_from(["", *"abc"]))
def test_every_size_has_tokens_in_every_family(width, height, suffix):
    """Rules of all families are total and bounded."""
    for model in ("qwen2-vl", "qwen3-vl", "gemma-3", "llama-4", "internvl3", "pixtral", "x"):
        tokens = media.estimate(model + suffix, "image", (width, height))
        assert 1 <= tokens <= 16_384
    for model in ("llava-1.6", "minicpm-v", "pixtral-12b", "glm-4.5v", "kimi-vl", "llava-1.5"):
        assert 1 <= media.estimate(model, "image", (width, height)) <= 16_384


@pytest.mark.parametrize("model", [QWEN, "gemma-3-27b-it", "x"])
def test_blocks_of_an_image_are_shared(model):
    """Two questions about an image share its blocks; with another image they share none of them."""
    first, second = png(1024, 768, content=b"x"), png(1024, 768, content=b"y")
    system = text("s" * 1000)
    what = ask(system, image(first), text("what is it?"), model=model)
    where = ask(system, image(first), text("where is it?"), model=model)
    other = ask(system, image(second), text("what is it?"), model=model)
    span = what.media[0]
    cuts = blocks.DEFAULT.cuts
    shared = sum(a == b for a, b in zip(chain(what), chain(where), strict=False))
    assert cuts[shared] > span.start + span.size - 256
    same = [a == b for a, b in zip(chain(what), chain(other), strict=False)]
    pairs = zip(what.prompt, other.prompt, strict=True)
    differs = next(at for at, (a, b) in enumerate(pairs) if a != b) // 256
    assert all(same[:differs])
    assert not any(same[differs:])
    assert span.start < 256 * (differs + 1) < span.start + 512


def test_turns_extend_prompts_with_images():
    """The prompt of the next turn begins with that of the last one, to the byte."""
    turn = [user([image(png(1024, 768)), text("what is it?")])]
    more = [{"role": "assistant", "content": "a cat"}, user([image(jpeg(640, 480))])]
    first, second = chat(*turn, model=QWEN), chat(*turn, *more, model=QWEN)
    assert second.prompt.startswith(first.prompt)
    assert second.media[: len(first.media)] == first.media


def test_room_of_images_is_bounded():
    """A thousand images have 512 KiB of room, 256 spans, and the tokens of all of them."""
    address = {"type": "image_url", "image_url": {"url": "https://a.example/b"}}
    request = ask(*[address] * 1000)
    assert len(request.prompt) < media.MAX_ROOM_BYTES + 100 * 1000
    assert len(request.media) == media.MAX_SPANS
    assert sum(item.count for item in request.media) == 1000
    assert sum(item.tokens for item in request.media) == 999_000
    assert sum(item.count for item in ask(*[address] * 2000).media) == media.MAX_ITEMS


def test_long_names_of_models_are_not_remembered():
    """Requests under names that are refused for their length leave nothing."""
    part = {"type": "image_url", "image_url": {"url": "https://a.example/b"}}
    tracemalloc.start()
    try:
        for number in range(50):
            model = f"{number}-" + "m" * 500_000
            body = json.dumps({"model": model, "messages": [user([part])]}).encode()
            refused = surfaces.parse(HttpRequest({":path": CHAT}, body))
            assert refused is surfaces.LONG_NAME
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 3_000_000


def test_room_goes_by_the_model_of_the_body():
    """A name from a header, or from the pool, leaves prompts as they are without a name."""
    body = {"messages": [user([image(png(1024, 768))])]}
    header = parsed(CHAT, body, x_gateway_model_name_rewrite="gemma-3")
    assert header.prompt == parsed(CHAT, {**body, "model": "unknown"}).prompt
    assert header.prompt != parsed(CHAT, {**body, "model": "gemma-3"}).prompt


def test_audio_is_counted_in_seconds():
    """The rate of WAV is in its header; other formats are taken for 128 kbit/s."""
    for data, seconds in ((wav(10), 10), (b"ID3" + b"x" * 160_000, 10), (b"ID3" + b"x" * 100, 1)):
        part = {"type": "input_audio", "input_audio": {"data": pictures.encoded(data)}}
        item = ask(part, model="qwen2-audio").media[0]
        assert (item.kind, item.tokens) == ("audio", 25 * seconds)


def test_videos_are_of_a_usual_size():
    """A video is 32 frames of 640 x 360 pixels, two of which are joined."""
    part = {"type": "video_url", "video_url": {"url": url(b"x" * 1000, "video/mp4")}}
    item = ask(part).media[0]
    assert (item.kind, item.tokens, item.is_sized) == ("video", 16 * 23 * 13, False)


VIDEO = {"type": "video_url", "video_url": {"url": url(b"x" * 1000, "video/mp4")}}


@pytest.mark.parametrize(
    ("headers", "tokens"),
    [
        ({"resolution": "1280x720"}, 16 * 768),
        ({"resolution": "448X224"}, 16 * 16 * 8),
        ({"duration_seconds": "0.5"}, 6 * 23 * 13),
        ({"duration_seconds": "2", "fps": "3.5"}, 4 * 23 * 13),
        ({"duration_seconds": "600", "fps": "60", "resolution": "99999x99999"}, 16 * 768),
        ({"duration_seconds": "0", "resolution": "28x28"}, 4),
    ],
)
def test_headers_say_the_size_of_videos(headers, tokens):
    """Frames are 32 at most, and shrunk as processors do."""
    named = {f"x_llm_d_video_{name}": value for name, value in headers.items()}
    request = parsed(CHAT, {"messages": [user([VIDEO])], "model": QWEN}, **named)
    assert (request.media[0].tokens, request.media[0].is_sized) == (tokens, True)


@pytest.mark.parametrize(
    "headers",
    [
        {"resolution": "1080p"},
        {"resolution": "0x720"},
        {"resolution": "640x360x2"},
        {"resolution": "1" * 4096 + "x1"},
        {"duration_seconds": "-1"},
        {"duration_seconds": "nan"},
        {"duration_seconds": "1e9"},
        {"fps": "1"},
    ],
)
def test_malformed_headers_of_videos_are_not_believed(headers):
    """As without them; a rate alone says nothing."""
    named = {f"x_llm_d_video_{name}": value for name, value in headers.items()}
    body = {"messages": [user([VIDEO])], "model": QWEN}
    assert parsed(CHAT, body, **named).media == parsed(CHAT, body).media


def test_forged_fields_are_bounded():
    """Bytes that no text has, in a prompt that no text makes, give items within bounds."""
    forged = b"\xf7i99999,99999,999999999;\xf7a,,;\xf7x1,1,1;" + struct.pack("B", 0xF7)
    laid_out, spans, text_bytes = media.lay_out(b"abc" + forged, "x")
    assert [item.start for item in spans] == [0]
    assert text_bytes + sum(item.size for item in spans) == len(laid_out)
    assert canonical_prompt.estimate(text_bytes) < 10


@pytest.mark.parametrize("kind", sorted(media.KINDS))
def test_media_among_many_parts_have_tokens(kind):
    """Long lists of parts are encoded many at a time where they hold no media."""
    parts = [{"type": "x", "n": n} for n in range(100)]
    assert media.MARKER in canonical_prompt.content([*parts, {"type": kind}])
    assert media.MARKER in canonical_prompt.content([*parts, {"image_url": "https://a.example/b"}])
