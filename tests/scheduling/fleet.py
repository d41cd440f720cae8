"""Builders of turns and candidates that name only the fact that matters."""

from random import Random

from extproc.endpoint import UNKNOWN, Candidate, Endpoint, Load
from extproc.request import Request
from extproc.scheduling.turn import Turn

SETS = ("adapters", "waiting_adapters")


def turn(seed=1, **request):
    return Turn(Request(**{"api": "chat", **request}), 100.0, Random(seed))


def candidate(name, **facts):
    own = {k: facts.pop(k) for k in ("in_flight", "prompt_tokens", "matched_tokens") if k in facts}
    requests = facts.pop("requests", None)
    facts |= {key: frozenset(facts[key]) for key in SETS if facts.get(key) is not None}
    load = Load(at=99.0, **facts) if facts else UNKNOWN
    if requests is None:
        scraped = (load.waiting or 0) + (load.running or 0)
        requests = max(own.get("in_flight", 0), scraped)
    return Candidate(
        endpoint=Endpoint(f"{name}:8000", name=name),
        load=load,
        age_s=1.0 if facts else float("inf"),
        requests=float(requests),
        **own,
    )


def candidates(endpoints):
    return [candidate(name, **(facts or {})) for name, facts in endpoints.items()]


def names(chosen):
    return [getattr(item, "endpoint", item).name for item in chosen]
