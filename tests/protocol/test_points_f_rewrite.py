"""Requests whose model gets another name, in every body mode."""

from __future__ import annotations

import json

import pytest

from extproc.decision import BodyEdit, Decision, Outcome
from extproc.endpoint import Endpoint, ServedModels
from extproc.request import HttpRequest, InferenceRequest
from tests.support import ext_proc_script
from tests.support.pool_fixture import PoolFixture, load

OLD = b'{"model" : "llama_sql", "messages": [{"role": "user", "content": "\\u00e9 llama_sql"}]}'
NEW = OLD.replace(b'"llama_sql"', b'"sql"')
LENGTH = ("content-length", str(len(NEW)))


def build_pool() -> PoolFixture:
    """One endpoint that lists a base model and its adapter."""
    queued = PoolFixture({ext_proc_script.ADDRESS: load(0, 0.0)})
    listed = ServedModels(frozenset({"llama"}), frozenset({"sql"}))
    queued.store.observe_models(queued.store.pool.members[0].endpoint, listed)
    return queued


def test_027_duplex_hands_on_the_edited_body():
    """Full duplex: the one value changed, every other byte as it came, and the new length."""
    queued = ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(OLD[:15]),
            ext_proc_script.request_body(OLD[15:], ends=True),
            ext_proc_script.route(sets=[LENGTH]),
            ext_proc_script.hand_on(NEW, ends=True),
        ],
        build_pool().decide,
    )
    assert queued.exchange.edited


def test_027_duplex_with_trailers():
    """A body that trailers end is edited all the same."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.request_body(OLD),
            ext_proc_script.request_trailers(),
            ext_proc_script.route(sets=[LENGTH]),
            ext_proc_script.hand_on(NEW),
            ext_proc_script.go_on("request_trailers"),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize(
    ("mode", "ends"),
    [("BUFFERED", "body"), ("BUFFERED", "trailers"), ("BUFFERED_PARTIAL", "body")],
)
def test_027_buffered_replaces_the_body(mode: str, ends: str):
    """Buffered: a plain body mutation with the pick, and the new length."""
    script = [
        ext_proc_script.request_headers(),
        ext_proc_script.go_on("request_headers"),
        ext_proc_script.request_body(OLD, ends=ends == "body"),
        ext_proc_script.route(part="request_body", sets=[LENGTH], replaces=NEW),
    ]
    if ends == "trailers":
        script += [ext_proc_script.request_trailers(), ext_proc_script.go_on("request_trailers")]
    ext_proc_script.play(script, build_pool().decide, modes=(mode, "NONE"))


@pytest.mark.parametrize("length_before", ["1000", "", "many"])
def test_027_a_cut_body_is_edited_in_the_part_that_is_shown(length_before: str):
    """BUFFERED_PARTIAL: the rest follows, so the length of the whole changes by the difference."""
    length = {"content-length": length_before} if length_before else {}
    known = [("content-length", str(1000 - len(OLD) + len(NEW)))] if length_before == "1000" else []
    ext_proc_script.play(
        [
            ext_proc_script.request_headers({**ext_proc_script.PLAIN, **length}),
            ext_proc_script.go_on("request_headers"),
            ext_proc_script.request_body(OLD[:60]),
            ext_proc_script.route(
                part="request_body",
                sets=known,
                replaces=OLD[:60].replace(b'"llama_sql"', b'"sql"'),
            ),
        ],
        build_pool().decide,
        modes=("BUFFERED_PARTIAL", "NONE"),
    )


def test_027_a_body_cut_before_the_name_is_unchanged():
    """A body without its model is not edited, and the exchange reports that."""
    queued = ext_proc_script.play(
        [
            ext_proc_script.request_headers(),
            ext_proc_script.go_on("request_headers"),
            ext_proc_script.request_body(b'{"messages": [], "model": "llama_sq'),
            ext_proc_script.route(part="request_body"),
        ],
        build_pool().decide,
        modes=("BUFFERED_PARTIAL", "NONE"),
    )
    assert not queued.exchange.edited


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
def test_027_a_body_that_is_not_awaited_cannot_be_edited(mode: str):
    """Decided on the headers: the gateway's name routes, and the body goes on as it is."""
    headers = {**ext_proc_script.PLAIN, "x-llm-d-model-name-rewrite": "sql"}
    script = [
        ext_proc_script.request_headers(headers),
        ext_proc_script.route(removes=["x-llm-d-model-name-rewrite"]),
    ]
    if mode == "STREAMED":
        script += [
            ext_proc_script.request_body(OLD, ends=True),
            ext_proc_script.go_on("request_body"),
        ]
    queued = ext_proc_script.play(script, build_pool().decide, modes=(mode, "NONE"))
    assert not queued.exchange.edited


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
def test_027_a_piece_of_a_streamed_body_is_never_edited(mode: str):
    """A stream that starts with a body piece: its headers, and so its length, are gone already."""

    def decide(_: HttpRequest) -> Outcome:
        return Decision(
            InferenceRequest("opaque"),
            [Endpoint(ext_proc_script.ADDRESS)],
            model_rewrite="b",
            body_edit=BodyEdit(0, 1, b"b"),
        )

    queued = ext_proc_script.Talk(decide, modes=(mode, "NONE"))
    (reply,) = queued.hear(ext_proc_script.request_body(b"a", ends=True))
    assert (reply.body, reply.replaces) == (None, None)
    assert not queued.exchange.edited


def test_027_a_header_of_the_gateway_names_the_model():
    """The reference's own case: header and body disagree, and the engine gets the header's name."""
    body = {"max_tokens": 100, "model": "my-model", "prompt": "x", "temperature": 0}
    sent = json.dumps(body).encode()
    wanted = json.dumps({**body, "model": "sql"}).encode()
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(
                {
                    **ext_proc_script.PLAIN,
                    ":path": "/v1/completions",
                    "x-llm-d-model-name-rewrite": "sql",
                }
            ),
            ext_proc_script.request_body(sent, ends=True),
            ext_proc_script.route(
                sets=[("content-length", str(len(wanted)))],
                removes=["x-llm-d-model-name-rewrite"],
            ),
            ext_proc_script.hand_on(wanted, ends=True),
        ],
        build_pool().decide,
    )


@pytest.mark.parametrize("size", [61_990, 62_005, 200_000])
def test_027_long_bodies_are_edited_and_cut_alike(size: int):
    """Pieces are cut from the edited body, and what the budget holds follows its size."""
    body = OLD[:-2] + b" " * (size - len(OLD)) + OLD[-2:]
    queued = ext_proc_script.Talk(build_pool().decide)
    queued.hear(ext_proc_script.request_headers())
    route, *pieces = queued.hear(ext_proc_script.request_body(body, ends=True))
    edited = body.replace(b'"llama_sql"', b'"sql"')
    assert dict(route.sets)["content-length"] == str(len(edited))
    assert b"".join(piece.body or b"" for piece in pieces) == edited
    assert max(len(piece.body or b"") for piece in pieces) <= 62_000
    assert queued.budget.held_bytes == 0


def test_027_an_edited_body_that_is_not_read_is_released():
    """A client that leaves before the pieces are written leaves nothing behind."""
    queued = ext_proc_script.Talk(build_pool().decide)
    queued.hear(ext_proc_script.request_headers())
    body = OLD[:-2] + b" " * 200_000 + OLD[-2:]
    assert queued.budget.held_bytes == 0
    queued.hear(ext_proc_script.request_body(body[:9]))
    assert queued.budget.held_bytes == 9
    queued.hear(ext_proc_script.request_body(body[9:]))
    queued.exchange.close()
    assert queued.budget.held_bytes == 0
