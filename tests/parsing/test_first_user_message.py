"""The beginning of the first user message, read from a framed prompt."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.parsing import surfaces
from extproc.request import HttpRequest, InferenceRequest, hash_affinity_key


def plain(prompt, api):
    """The same rule by regular expressions, without a care for speed."""
    if api == "completions":
        texts = [prompt]
    else:
        message = re.search(rb"\xffuser[^\xff]*", prompt)
        texts = re.findall(rb"\xfe([^\xfe]*)", message[0]) if message else []
    texts = [re.split(rb"[\xf8-\xff]", text[: surfaces.USER_MESSAGE_BYTES])[0] for text in texts]
    return "".join(text.decode("utf-8", "ignore") for text in texts)[: surfaces.USER_MESSAGE_BYTES]


pieces = st.sampled_from(
    [b"\xffuser", b"\xffsystem", b"\xfe", b"\xfd{}", b"\xf8s", "né".encode(), b"text", b"x" * 9000]
)


@given(
    # Salted prompts are looked at below, as the parser makes them.
    prompt=st.lists(pieces, max_size=12).map(b"".join).filter(lambda text: text[:1] != b"\xf8"),
    api=st.sampled_from(["chat", "completions", "messages"]),
)
def test_first_user_message_follows_the_rule(prompt, api):
    """Any mixture of fields reads as a plain statement of the rule reads it."""
    request = InferenceRequest(api=api, prompt=prompt)
    text = surfaces.first_user_message(request)
    assert text == plain(prompt, api)
    raw_text = surfaces.find_first_user_message(request)
    assert hash_affinity_key(raw_text) == hash_affinity_key(text)


def test_a_cut_character_is_dropped():
    """A text that is cut inside a character keeps the characters before it."""
    prompt = b"\xffuser\xfe" + "é".encode() * surfaces.USER_MESSAGE_BYTES
    assert set(surfaces.first_user_message(InferenceRequest(api="chat", prompt=prompt))) == {"é"}


def test_system_prompts_and_images_are_no_first_user_message():
    """Only the text parts of the first user message count."""
    prompt = b"\xffsystem\xfebe kind\xffuser\xfd{image}\xfewhat\xfe is it\xffuser\xfelater"
    assert surfaces.first_user_message(InferenceRequest(api="chat", prompt=prompt)) == "what is it"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "Once upon a time"}, "Once upon a time"),
        ({"prompt": "Once", "cache_salt": "pepper"}, "Once"),
        ({"prompt": ["Once", "Twice"]}, "Once"),
        ({"prompt": ""}, ""),
        ({"prompt_embeds": "AAAA"}, ""),
    ],
)
def test_the_first_user_message_of_a_completion_is_its_prompt(body, expected):
    """As the parser reads it: alone, salted, the first of a batch; none without a text."""
    headers = {":method": "POST", ":path": "/v1/completions"}
    encoded = msgspec.json.encode({"model": "m", **body})
    assert surfaces.first_user_message(surfaces.parse(HttpRequest(headers, encoded))) == expected
