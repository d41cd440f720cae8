from __future__ import annotations

import random

from extproc.simulator import core, engine_request, profiles

TURNS = 7


def conversation(number, *, turns=TURNS):
    """Prompt lengths of the turns of one conversation, about 200 tokens apart."""
    rng = random.Random(number)
    length, prompts = 0, []
    for _ in range(turns):
        length += rng.randint(150, 260)
        prompts.append(length)
    return prompts


def hit_ratio(route, *, engines, conversations=40):
    """Cached share of all prompt tokens when turn t of conversation c goes to route(c, t, n)."""
    fleet = [core.SimulatedEngine(profiles.PROFILES["demo"]) for _ in range(engines)]
    order = [(turn, c) for turn in range(TURNS) for c in range(conversations)]
    for n, (turn, c) in enumerate(order):
        prompt = conversation(c)[turn]
        hashes = range(c * 10_000, c * 10_000 + prompt // 16)
        it = fleet[route(c, turn, n)]
        it.submit(engine_request.EngineRequest(f"r{n}", prompt, 32, hashes), float(n))
        while it.step(float(n)) is not None:
            pass
    return sum(it.prefix_hits for it in fleet) / sum(it.prefix_queries for it in fleet)


def test_forty_conversations_fit_four_demo_engines_but_not_one():
    """Sticky routing over four engines hits nearly everything, one engine hardly anything."""
    assert hit_ratio(lambda c, t, n: c % 4, engines=4) > 0.7
    assert hit_ratio(lambda c, t, n: 0, engines=1) < 0.1


def test_prefix_routing_pays_on_demo_engines():
    """Sticky routing hits at least twice as much as conversations wandering over the engines."""
    rng = random.Random(0)
    wandering = hit_ratio(lambda c, t, n: rng.randrange(4), engines=4)
    assert hit_ratio(lambda c, t, n: c % 4, engines=4) > 2 * wandering
