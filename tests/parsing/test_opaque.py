import pytest

from extproc.parsing import other_apis, surfaces
from extproc.request import HttpRequest, InferenceRequest
from tests.parsing import builders
from tests.parsing.builders import CHAT

COUNTS = ["/tokenize", "/v1/messages/count_tokens"]


def truncated(path, body, **headers):
    return surfaces.parse(HttpRequest({":path": path, **headers}, body, truncated=True))


def test_conformance_body():
    """Point 33: model and prompt are read on a path that is not in the table."""
    request = builders.parsed("/primary-gateway-test", {"model": "m", "prompt": "hi"})
    assert (request.api, request.model, request.prompt) == ("opaque", "m", b"hi")


def test_chat_body_on_another_path():
    """Messages are read there too, with the bytes they have on the chat path."""
    body = {"model": "m", "messages": [builders.user("hi")]}
    assert builders.parsed("/invocations", body).prompt == builders.parsed(CHAT, body).prompt


@pytest.mark.parametrize("path", ["generate", "generate_stream", "versions/1/generate"])
def test_prompt_of_triton(path):
    """Triton's own paths have a prompt and a bound of the answer; the model in the path is not read."""
    body = {"text_input": "hi", "max_tokens": 20}
    request = builders.parsed(f"/v2/models/ensemble/{path}", body)
    assert (request.model, request.prompt, request.max_tokens) == ("", b"hi", 20)


def test_loading_an_adapter_is_no_request_for_one():
    """The path there is that of files: it is no name, however long, and the engine gets it."""
    path = "/adapters/" + "x" * 600
    body = {"lora_name": "sql", "lora_path": path}
    assert builders.parsed("/v1/load_lora_adapter", body) == InferenceRequest("opaque")
    assert builders.parsed("/invocations", {"prompt": "hi", "lora_path": "sql"}).adapter == "sql"


@pytest.mark.parametrize("path", ["/invocations", *COUNTS])
def test_lone_surrogates_are_mended(path):
    """As on the paths of chats: JavaScript clients cut strings inside an emoji."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi \\ud83d"}]}'
    assert builders.parsed(path, body).model == "m"


@pytest.mark.parametrize(
    "body",
    [
        b"\x00\xff not json",
        b"{",
        b"[1, 2]",
        b"{}",
        b'{"model": 5, "prompt": {"a": 1}}',
        b'{"model": "\xff"}',
        b'{"messages": {"a": 1}}',
        b'{"model": ' + b"[" * 100_000,
    ],
    ids=range(8),
)
def test_other_bodies_are_routed(body):
    """Point 34: no body is refused on a path that is not in the table."""
    request = builders.parsed("/anything", body)
    assert (request.api, request.model) == ("opaque", "")


def test_large_bodies_are_not_decoded():
    """An upload on an unknown path costs no decode."""
    body = b'{"model": "m", "x": "' + b"x" * other_apis.MAX_OPAQUE_BYTES + b'"}'
    assert builders.parsed("/upload", body).model == ""


@pytest.mark.parametrize("path", COUNTS)
def test_large_counts_are_decoded(path):
    """Conversations with images are counted in bodies of any size, and their model may be renamed."""
    text = "x" * other_apis.MAX_OPAQUE_BYTES
    request = builders.parsed(path, {"messages": [{"role": "user", "content": text}], "model": "m"})
    assert (request.model, request.prompt) == ("m", b"")


def test_truncated_body():
    """Of a cut body the model, the stream flag and the raw bytes are read."""
    body = b'{"model": "a\\/b", "stream": true, "messages": [{"content": "\\"model\\": \\"x'
    request = truncated(CHAT, body, **{"content-length": "4000", "x-session-id": "s"})
    assert (request.api, request.model, request.stream) == ("chat", "a/b", True)
    assert (request.prompt, request.prompt_tokens, request.session) == (body, 1000, "s")


@pytest.mark.parametrize(
    "body",
    [
        b'{"tools": [{"model": "tool"}], "model": "m", "messages": [{"content": "x',
        b'{"model": "m", "metadata": {"model": "other"}, "prompt": "x',
        b'{"metadata": "\\"model\\": \\"other\\"", "mod\\u0065l": "m", "prompt": [1, 2',
    ],
)
def test_the_model_of_a_cut_body_is_that_of_the_outermost_object(body):
    """Members of the same name in other objects, and text that looks so, are not."""
    assert truncated(CHAT, body).model == "m"


@pytest.mark.parametrize(
    "body", [b"{", b'{"model": "cut', b'{"model": "\\x"', b"\xff\xfe", b'{"model":"\xff"']
)
@pytest.mark.parametrize("path", [CHAT, "/x", "/vllm.grpc.engine.VllmEngine/Generate"])
def test_truncated_bodies_are_never_refused(path, body):
    """A cut body without a readable model is routed without one, or with the header's."""
    request = truncated(path, body, **{"content-length": "-5"})
    assert (request.model, request.prompt) == ("", body)
    assert truncated(path, body, **{"x-llm-d-model-name-rewrite": "t"}).model == "t"


@pytest.mark.parametrize("path", COUNTS)
def test_truncated_token_counts_have_no_prompt(path):
    """A cut body that is only counted still names its model, and leaves nothing in a cache."""
    request = truncated(path, b'{"model": "m", "messages": [{"content": "x')
    assert (request.model, request.prompt, request.prompt_tokens) == ("m", b"", 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/v1/completions/render"])
def test_truncated_render_requests_leave_no_prompt(path):
    """A rendered prompt is in no prefix cache, even if the end of the body is missing."""
    request = truncated(path, b'{"model": "m", "prompt": "' + 4000 * b"a")
    assert request.model == "m"
    assert (request.prompt, request.prompt_tokens, request.prompt_bytes) == (b"", 0, 0)
