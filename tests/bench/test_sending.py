from __future__ import annotations

import asyncio
import itertools
import random

import msgspec
import pytest

from bench import sending
from extproc.parsing import surfaces
from extproc.request import HttpRequest
from extproc.simulator import prompt
from extproc.simulator.fleet import workloads
from extproc.simulator.fleet.workloads import Lengths

TURNS = workloads.ConversationWorkload(
    conversations=12,
    turns=Lengths(mean=4, deviation=1, lowest=2),
    prompt=Lengths(mean=90, deviation=60, lowest=32),
    output=Lengths(mean=40, deviation=30),
)
GROUPS = workloads.SharedPrefix(
    requests=40,
    groups=4,
    prefix=Lengths(mean=150, deviation=40, lowest=40),
    prompt=Lengths(mean=50, deviation=30),
    output=Lengths(mean=20),
    adapters=3,
)
UNIQUE = workloads.Independent(
    requests=20, prompt=Lengths(mean=60, lowest=32), output=Lengths(mean=9)
)


def works(workload):
    """Every request, for adapters where the workload has some, in the order of its session."""
    adapters = workloads.adapters(workload)
    for n, session in enumerate(workloads.sessions(sending.Spelled(workload), random.Random(7))):
        yield from workloads.adapted(session.specs, n % adapters) if adapters else session.specs


def shared(text, other):
    """Number of blocks that two chains have in common from the start."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("workload", [TURNS, GROUPS, UNIQUE], ids=["turns", "groups", "unique"])
def test_the_engine_cuts_texts_into_the_blocks_of_their_keys(workload):
    """Prompts are as long as they say, and any two share as many blocks as they share keys."""
    texts = sending.Texts()
    cut = []
    for work in works(workload):
        text = texts.render(work).encode()
        assert prompt.count(text) == work.prompt_tokens
        assert len(text) == 4 * work.prompt_tokens
        hashes = prompt.hashes(text, salt=work.adapter, block_tokens=16)
        cut.append((hashes, work.keys[: work.prompt_tokens // 16]))
    for (hashes, keys), (others, other_keys) in itertools.combinations(cut, 2):
        assert shared(hashes, others) == shared(keys, other_keys)


def test_the_next_turn_repeats_the_answer():
    """The engine's answer to a prompt stands in the next one, as far as whole blocks of it go."""
    texts, repeated = sending.Texts(), 0
    for session in workloads.sessions(TURNS, random.Random(7)):
        dialog = ""
        for work in session.specs:
            text = texts.render(work)
            full = len(dialog) // 64 * 64
            assert text[:full] == dialog[:full]
            repeated += bool(dialog)
            dialog = text + prompt.answer(text.encode(), work.output_tokens)
    assert repeated


@pytest.mark.parametrize("workload", [TURNS, GROUPS, UNIQUE], ids=["turns", "groups", "unique"])
def test_openings_are_those_a_picker_reads(workload):
    """The first 100 characters, which prefix-hash keys on, are the same in both worlds."""
    texts = sending.Texts()
    for work in works(workload):
        body = {"model": "m", "prompt": texts.render(work)}
        headers = {":method": "POST", ":path": "/v1/completions"}
        read = surfaces.parse(HttpRequest(headers, msgspec.json.encode(body)))
        assert surfaces.first_user_message(read)[:100] == work.opening[:100]
        assert read.prompt_tokens == work.prompt_tokens


def test_what_a_timeline_runs_in_one_moment_keeps_its_order():
    """On the real clock, too; and what an act raises is kept for its waiter."""

    async def played():
        wall, order = sending.Wall(), []
        for n in range(50):
            wall.at(0.0, lambda n=n: order.append(n))
        wall.at(0.0, lambda: 1 / 0)
        over = asyncio.Event()
        wall.after(0.001, over.set)
        await over.wait()
        return order, wall.broken

    order, broken = asyncio.run(played())
    assert order == list(range(50))
    assert isinstance(broken, ZeroDivisionError)
