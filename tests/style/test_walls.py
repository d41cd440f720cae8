"""Objects are changed by their own classes: no module assigns to attributes of another's objects."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator

import pytest

from tests.style import names

#: Files, the attributes they may assign to, and the reason.
ALLOWED = (
    ("extproc/cli/*.py", "config_file description help unknown_flags", "argparse is not ours"),
    ("extproc/cli/main.py", "stderr stdout", "sys is not ours; the caller may have closed them"),
    ("extproc/scrape/client_tls.py", "check_hostname verify_mode", "ssl is not ours"),
    ("extproc/config/plugin_loader.py", "__file__", "the module of a plugin file"),
    (
        "extproc/discovery/kubernetes/api_client.py",
        "connection_pool_maxsize disable_strict_ssl_verification",
        "the client of Kubernetes is not ours",
    ),
    (
        "extproc/http2/*.py",
        (
            "has_moved has_responded held_bytes is_paused is_remote_closed last_id "
            "output received_bytes send_window_bytes source trailers unsent unsent_at writes"
        ),
        "a stream is plain data of the package, which both directions write for every frame",
    ),
    (
        "extproc/server/admin*.py",
        "connection_lost connection_made request_factory",
        "aiohttp is not ours",
    ),
    ("extproc/scrape/client.py", "verify_flags", "ssl is not ours"),
    ("extproc/server/tls.py", "minimum_version options", "ssl is not ours"),
    (
        "extproc/wire/codec.py",
        (
            "body code number_value response_body_mode response_header_mode "
            "response_trailer_mode status string_value"
        ),
        "messages of protobuf",
    ),
    (
        "extproc/flow_control/*.py",
        "endpoints has_preferred is_queued number place preferred_endpoint",
        "a queued item is plain data of the package, which the queue and its bands write",
    ),
    (
        "extproc/prefix_cache/index.py",
        "children holders partly",
        "a node is plain data of the tree, which its index writes for every block",
    ),
    (
        "extproc/telemetry/*_recorder.py",
        "direct_responses streams_open",
        "counters are plain data of the package, written for every request",
    ),
    (
        "extproc/simulator/core.py",
        (
            "cached computed decoding first_s first_token_at generated growth_s hashes held "
            "received reloaded started_at state steps stopped_at target"
        ),
        "sequences and plans are plain data of the simulated engine, which the core writes",
    ),
    (
        "extproc/simulator/fleet/*.py",
        "cached_tokens failure first_s held_s node predicted_tokens prefill_node received_tokens took_s",
        "a simulated request is plain data of the fleet, on which each part notes its result",
    ),
)


def find_foreign_writes(path: str, text: str) -> Iterator[str]:
    """Find assignments to attributes that no class of the module declares.

    `self` and `cls` are left out, and what `ALLOWED` has.

    Returns:
        A line for each, as `path:line: target`.
    """
    tree = ast.parse(text)
    declared = {name for node in ast.walk(tree) for name in _declared(node)}
    for pattern, attributes, _ in ALLOWED:
        if fnmatch.fnmatch(path, pattern):
            declared |= set(attributes.split())
    for node in ast.walk(tree):
        if _is_foreign_write(node) and node.attr not in declared:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def _declared(node: ast.AST) -> Iterator[str]:
    """Attributes that a class declares in its body, or that a method sets on `self`."""
    match node:
        case ast.ClassDef():
            for statement in node.body:
                match statement:
                    case ast.AnnAssign(target=ast.Name(id=name)):
                        yield name
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            yield name


def _is_foreign_write(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
    )


def test_no_module_writes_to_objects_of_another():
    """Attributes are assigned by the module of their class."""
    writes = [
        line
        for path in names.sources(names.ROOT / "extproc")
        for line in find_foreign_writes(str(path.relative_to(names.ROOT)), path.read_text())
    ]
    assert writes == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gate.arrivals = run", ["m.py:1: gate.arrivals"]),
        ("a.b.count += 1", ["m.py:1: a.b.count"]),
        ("x, a.b = 1, 2", ["m.py:1: a.b"]),
        ("del a.b", ["m.py:1: a.b"]),
        ("class A:\n  def run(self): self.b = 1\na.b = 2", []),
        ("class A:\n  b: int\na.b = 2", []),
        ("a[0] = 2", []),
    ],
)
def test_find_foreign_writes_finds_each_form(text, expected):
    """Plain, augmented and unpacked assignments, and deletions."""
    assert list(find_foreign_writes("m.py", text)) == expected


def test_each_exception_is_needed():
    """No entry of the list allows what nothing does."""
    used = set()
    for path in names.sources(names.ROOT / "extproc"):
        relative = str(path.relative_to(names.ROOT))
        written = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if _is_foreign_write(node)
        }
        used |= {
            (pattern, name)
            for pattern, attributes, _ in ALLOWED
            if fnmatch.fnmatch(relative, pattern)
            for name in written.intersection(attributes.split())
        }
    assert used == {(pattern, name) for pattern, listed, _ in ALLOWED for name in listed.split()}
