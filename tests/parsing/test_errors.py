import pytest

from extproc.parsing import surfaces
from extproc.request import HttpRequest, InferenceRequest
from tests.parsing import builders
from tests.parsing.builders import CHAT
from tests.support.canary import CANARY

UNMARSHAL = "error unmarshaling request bodyMap: "
JSON_PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/conversations",
    "/v1/images/generations",
    "/v1/messages",
    "/rerank",
    "/score",
    "/pooling",
)


@pytest.mark.parametrize("path", JSON_PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "m" "x"}',
        b"[]",
        b'"model"',
        b"null",
        b"hello " + CANARY.encode(),
        b'{"model": "m", "messages": "' + CANARY.encode(),
        b'{"model": "\xff"}',
        b'{"model": ' + b"[" * 100_000,
        b'{"skipped": ' + b"[" * 100_000,
        b'{"model": 1e999}',
    ],
    ids=range(11),
)
def test_body_that_is_no_json_object(path, body):
    """Point 69: such a body is refused on every JSON path, and its text is not quoted."""
    message = builders.refused(path, body)
    assert message.startswith((UNMARSHAL, "model not found"))
    assert CANARY not in message


@pytest.mark.parametrize("path", JSON_PATHS)
def test_model_is_demanded(path):
    """Point 70 on every inference path with a JSON body."""
    body = {"prompt": "x", "input": "x", "messages": [builders.user("x")], "items": []}
    assert builders.refused(path, body) == "model not found in request body"


def test_model_is_demanded_without_a_path():
    """Point 70 as the reference sends it: no path at all means /v1/completions."""
    outcome = surfaces.parse(HttpRequest({}, b'{"prompt":"hello world"}'))
    assert outcome.message == "model not found in request body"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "/v1/chat/completions",
            "invalid chat completions request: must have valid messages field",
        ),
        ("/v1/completions", "invalid completions request: must have prompt field"),
        ("/v1/embeddings", "invalid embeddings request: must have input field"),
        ("/v1/responses", "invalid responses request: must have input field"),
        ("/v1/conversations", "invalid conversations request: must have items field"),
        ("/v1/images/generations", "invalid images generations request: must have prompt field"),
        ("/v1/messages", "invalid messages request: must have at least one message"),
        ("/inference/v1/generate", "invalid generate request: must have token_ids field"),
    ],
)
def test_the_prompt_is_demanded(path, message):
    """Point 71: a missing messages, prompt, input or items field has its own text."""
    assert builders.refused(path, {"model": "m"}) == message


@pytest.mark.parametrize("path", [f"/{surface.path}" for surface in surfaces.SURFACES])
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "get"])
def test_methods_without_a_prompt(path, method):
    """Points 30 to 32: GET and the like are opaque on every path, whatever their body."""
    raw = HttpRequest({":method": method, ":path": path}, b"{")
    assert surfaces.parse(raw) == InferenceRequest("opaque")


@pytest.mark.parametrize("path", [f"/{surface.path}" for surface in surfaces.SURFACES])
def test_empty_bodies(path):
    """Point 30: an empty body is a bodiless request on every path."""
    subset = ("10.0.0.1:8000",)
    raw = HttpRequest({":method": "POST", ":path": path, "x-session-id": "s"}, b"", subset=subset)
    assert surfaces.parse(raw) == InferenceRequest("opaque", session="s", subset=subset)


def test_subset_is_passed_on():
    """The subset hint goes from raw request to request, an empty one included."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    for subset in (None, (), ("a:1", "b")):
        assert surfaces.parse(HttpRequest({":path": CHAT}, body, subset=subset)).subset == subset


def test_deep_values_are_refused_not_raised():
    """A body that decodes at the edge of the recursion limit is answered, not raised."""
    for depth in range(300, 1200, 7):
        part = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"model":"m","messages":[{"role":"user","content":[' + part + b"]}]}"
        outcome = surfaces.parse(HttpRequest({":path": CHAT}, body))
        assert isinstance(outcome, InferenceRequest) or outcome.message.startswith(UNMARSHAL)
        assert isinstance(surfaces.parse(HttpRequest({":path": "/other"}, body)), InferenceRequest)


@pytest.mark.parametrize("path", [*JSON_PATHS, "/tokenize", "/v1/audio/transcriptions"])
def test_encoded_bodies_are_rejected_by_name(path):
    """Engines do not decompress bodies; the message names the header, not what is wrong inside."""
    raw = builders.post(path, {"model": "m", "prompt": "x"}, content_encoding="gzip")
    outcome = surfaces.parse(raw)
    assert (outcome.status, "content-encoding" in outcome.message) == (415, True)


def test_encoded_bodies_on_other_paths_are_opaque():
    """An unknown path is routed."""
    assert builders.parsed("/upload", b"\x1f\x8b", content_encoding="gzip").api == "opaque"


@pytest.mark.parametrize("encoding", ["Identity", "utf-8", "none", " ", "identity, identity"])
def test_encodings_that_compress_nothing_are_read(encoding):
    """Some clients write the charset."""
    body = {"model": "m", "prompt": "x"}
    assert builders.parsed("/v1/completions", body, content_encoding=encoding).model == "m"
