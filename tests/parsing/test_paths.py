import pytest

from extproc.parsing import surfaces
from extproc.request import HttpRequest


@pytest.mark.parametrize("suffix", surfaces.SURFACES)
@pytest.mark.parametrize("prefix", ["/", "/v1/", "/tenant/a/v1/"])
@pytest.mark.parametrize("tail", ["", "/", "?a=b/c", "/?x"])
def test_suffix_names_the_surface(prefix, suffix, tail):
    """A surface is found under any prefix, with a query string and a trailing slash."""
    assert surfaces.surface_of(prefix + suffix + tail) == surfaces.SURFACES[suffix]


def test_every_surface_has_a_parser():
    """Path table and parser table name the same surfaces."""
    assert set(surfaces.SURFACES.values()) == set(surfaces.PARSERS)


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
    assert surfaces.surface_of(path) == surfaces.OPAQUE


def test_longest_suffix_wins():
    """The generate path of vLLM is not mistaken for SGLang's, nor chat for completions."""
    assert surfaces.surface_of("/inference/v1/generate") == "generate"
    assert surfaces.surface_of("/generate") == "sglang_generate"
    assert surfaces.surface_of("/v1/chat/completions") == "chat"


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
    """`:path`, then x-original-path, then x-forwarded-path, then /v1/completions (report 1.6)."""
    assert surfaces.path_of(HttpRequest(headers)) == path
