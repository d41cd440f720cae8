import msgspec
import pytest

from extproc.parsing import surfaces
from extproc.request import HttpRequest, path_of


@pytest.mark.parametrize("surface", surfaces.SURFACES, ids=lambda surface: surface.api)
@pytest.mark.parametrize("prefix", ["/", "/v1/", "/tenant/a/v1/"])
@pytest.mark.parametrize("tail", ["", "/", "?a=b/c", "/?x"])
def test_path_names_the_surface(prefix, surface, tail):
    """A surface is found under any prefix, with a query string and a trailing slash."""
    assert surfaces.surface_of(prefix + surface.path + tail) is surface


def test_surfaces_are_distinct():
    """No two surfaces share a path or a name."""
    rows = [*surfaces.SURFACES, surfaces.OPAQUE, surfaces.GRPC]
    assert len({row.path for row in surfaces.SURFACES}) == len(surfaces.SURFACES)
    assert len({row.api for row in rows}) == len(rows)


@pytest.mark.parametrize("surface", surfaces.SURFACES, ids=lambda surface: surface.api)
def test_parser_gives_the_name_of_its_surface(surface):
    """A parsed request has the name of the surface that its path belongs to."""
    body = {"model": "m", "messages": [{"role": "user"}], "prompt": "p", "input": "i"}
    body |= {"items": ["i"], "token_ids": [1], "query": "q"}
    content = msgspec.json.encode(body)
    if surface.api.startswith("grpc_"):
        content = b"\0\0\0\0\5\x12\3\x12\1\1"
    request = surfaces.parse(HttpRequest({":path": f"/v1/{surface.path}"}, content))
    assert request.api == surface.api


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/v1/models",
        "/v1/chat/completions/extra",
        "/v1/xcompletions",
        "/v1/responses/resp_1",
        "/vllm.grpc.engine.VllmEngine/Abort",
        "/primary-gateway-test",
    ],
)
def test_other_paths_are_opaque(path):
    """A suffix matches whole segments at the end of the path only."""
    assert surfaces.surface_of(path) is surfaces.OPAQUE


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/%63hat/completions", "chat"),
        ("/v1%2Fchat%2fcompletions/%2F?a=%3F", "chat"),
        ("/v1/%e9%FF/comp%6Cetions", "completions"),
        ("/v1//chat/completions", "chat"),
        ("/v1/chat//completions", "chat"),
        ("/v1/messages//count_tokens//", "count_tokens"),
        ("/v1/chat/completions%3Fa", "opaque"),
        ("/v1/%2563ompletions", "opaque"),
        ("/v1/%zzcompletions", "opaque"),
        ("/v1/" + "%41" * 100 + "/completions", "completions"),
        ("/v1/" + "%41" * 100 + "/%63ompletions", "opaque"),
    ],
)
def test_encoded_paths_are_decoded_once(path, api):
    """As engines do, up to a length, and slashes are merged; a decoded question mark begins no query."""
    assert surfaces.surface_of(path).api == api


def test_longest_suffix_wins():
    """The generate path of vLLM is not mistaken for SGLang's, nor chat for completions."""
    assert surfaces.surface_of("/inference/v1/generate").api == "generate"
    assert surfaces.surface_of("/generate").api == "sglang_generate"
    assert surfaces.surface_of("/v1/chat/completions").api == "chat"


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({":path": "/a", "x-original-path": "/b"}, "/a"),
        ({"x-original-path": "/b", "x-forwarded-path": "/c"}, "/b"),
        ({"x-forwarded-path": "/c"}, "/c"),
        ({":path": "", "x-forwarded-path": "/c"}, "/c"),
        ({}, "/v1/completions"),
    ],
)
def test_path_source(headers, path):
    """`:path`, then x-original-path, then x-forwarded-path, then /v1/completions (docs/spec/protocol.md#request-paths)."""
    assert path_of(headers) == path
