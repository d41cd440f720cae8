import struct

import pytest

from tests.parsing import builders

PATH = "/v1/completions"


def completion(prompt, **fields):
    return builders.parsed(PATH, {"model": "m", "prompt": prompt, **fields})


def packed(*ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def test_text_is_the_prompt_itself():
    """One text is its UTF-8, a quarter of it the estimate of its tokens."""
    request = completion("h\u00e9llo world!", stream=True, max_tokens=3)
    assert (request.api, request.prompt) == ("completions", "h\u00e9llo world!".encode())
    assert (request.prompt_tokens, request.stream, request.max_tokens) == (3, True, 3)


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("a" * 400, 100)])
def test_estimate(text, tokens):
    """Any text has at least one token, no text has none."""
    assert completion(text).prompt_tokens == tokens


def test_first_of_a_batch_is_the_prefix():
    """A batch of texts starts with the bytes of its first text."""
    assert completion(["abc", "de"]).prompt == b"abc\xfede"
    assert completion(["abc"]).prompt == completion("abc").prompt


def test_token_ids_are_packed():
    """Token ids are four little-endian bytes each and their count is exact."""
    request = completion([1, 2, 70000])
    assert (request.prompt, request.prompt_tokens) == (packed(1, 2, 70000), 3)


def test_batch_of_token_ids():
    """Batches are separated by a token no vocabulary has, and counted together."""
    request = completion([[1, 2], [3]])
    assert request.prompt == packed(1, 2) + b"\xff\xff\xff\xff" + packed(3)
    assert request.prompt_tokens == 3
    assert request.prompt != completion([1, 2, 3]).prompt


@pytest.mark.parametrize("prompt", [[1, "a"], [[1], "a"], [-1], [2**40], [1.5], [None], [[["x"]]]])
def test_odd_lists_are_still_routed(prompt):
    """The engine judges a list of odd members; here it is only bytes."""
    assert completion(prompt).prompt


@pytest.mark.parametrize("prompt", [None, [], 5, True])
def test_no_prompt(prompt):
    """Nothing, an empty list and a number are no prompt."""
    message = builders.refused(PATH, {"model": "m", "prompt": prompt})
    assert message == "invalid completions request: must have prompt field"


def test_embedded_prompt():
    """The prompt_embeds of vLLM stands in for a prompt and is digested."""
    body = {"model": "m", "prompt_embeds": "QUJD" * 100}
    assert 0 < len(builders.parsed(PATH, body).prompt) < 60


@pytest.mark.parametrize("prompt", ["abc", [1, 2]])
def test_salt_isolates(prompt):
    """The salt stands first and keeps token ids on whole tokens."""
    plain, salted = completion(prompt), completion(prompt, cache_salt="pepper")
    assert salted.prompt.endswith(plain.prompt)
    assert salted.prompt.startswith(b"\xf8pepper")
    assert (len(salted.prompt) - len(plain.prompt)) % 4 == 0
    assert salted.prompt_tokens == plain.prompt_tokens


def test_images():
    """An image generation has a prompt like a completion."""
    request = builders.parsed("/v1/images/generations", {"model": "m", "prompt": "a cat"})
    assert (request.api, request.prompt) == ("images", b"a cat")


@pytest.mark.parametrize(
    ("path", "api"), [("/v1/embeddings", "embeddings"), ("/pooling", "pooling")]
)
def test_inputs(path, api):
    """Embeddings and pooling read input, or vLLM's messages."""
    request = builders.parsed(path, {"model": "m", "input": ["a", "b"]})
    assert (request.api, request.prompt) == (api, b"a\xfeb")
    request = builders.parsed(path, {"model": "m", "messages": [builders.user("a")]})
    assert request.prompt == b"\xffuser\xfea"


@pytest.mark.parametrize("messages", [None, [], ["a"], {"a": 1}])
def test_embeddings_without_input(messages):
    """Messages that are none do not stand in for an input; pooling leaves that to the engine."""
    body = {"model": "m", "messages": messages}
    message = "invalid embeddings request: must have input field"
    assert builders.refused("/v1/embeddings", body) == message
    assert builders.parsed("/pooling", body).prompt == b""
