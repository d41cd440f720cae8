"""Builders that name only the fact that matters."""

from __future__ import annotations

import random

from extproc.config import pool_sections
from extproc.config.settings import Settings
from extproc.simulator.fleet import client, scenario, simulation, workloads
from extproc.simulator.fleet.sim_request import RequestSpec, SimRequest, SimSession


def exactly(mean) -> workloads.Lengths:
    """Always this length."""
    return workloads.Lengths(mean=mean)


def spread_out(mean) -> workloads.Lengths:
    """Lengths with a long tail."""
    return workloads.Lengths(mean=mean, deviation=mean / 2, shape="lognormal")


def independent(requests=40, **facts) -> workloads.Independent:
    """Prompts that share nothing: 200 tokens, 20 of answer."""
    defaults = {"requests": requests, "prompt": exactly(200), "output": exactly(20)}
    return workloads.Independent(**(defaults | facts))


def conversations(count=10, **facts) -> workloads.ConversationWorkload:
    """Conversations of 4 turns that share one system prompt."""
    defaults = {
        "conversations": count,
        "turns": exactly(4),
        "prompt": exactly(100),
        "output": exactly(20),
        "system": exactly(320),
    }
    return workloads.ConversationWorkload(**(defaults | facts))


def a_scenario(workload=None, **facts) -> scenario.Scenario:
    """Two engines and four users."""
    defaults = {
        "fleet": [scenario.EngineGroup(count=2, profile="demo")],
        "client": client.Client(users=4),
        "seeds": [1, 2],
    }
    return scenario.Scenario(workload=workload or independent(), **(defaults | facts))


def settings(strategy="adaptive") -> Settings:
    """A configuration of one word."""
    return Settings(scheduling=pool_sections.SchedulingSection(strategy=strategy))


def a_simulation(definition=None, strategy="adaptive", *, seed=1, rows=()) -> simulation.Simulation:
    """A simulation that has not run yet."""
    chosen = None if strategy == scenario.CLAIRVOYANT else settings(strategy)
    return simulation.Simulation(definition or a_scenario(), chosen, seed=seed, rows=rows)


def summary(definition=None, strategy="adaptive", *, seed=1):
    """Summary of one run."""
    return a_simulation(definition, strategy, seed=seed).run().summary()


def sessions(workload, seed=1, rows=()) -> list[SimSession]:
    """All sessions of a workload."""
    return list(workloads.sessions(workload, random.Random(seed), rows))


def work(prompt=64, output=4, *, base=0, adapter="") -> RequestSpec:
    """A request; those with the same `base` share their keys."""
    return RequestSpec(prompt, output, range(base, base + prompt // 16), adapter)


def sim_request(name="r1", now=0.0, **facts) -> SimRequest:
    """A request on its way."""
    return SimRequest(name, work(**facts), now)


def advance(timeline, seconds) -> None:
    """Let everything happen until so many seconds from now, and stop there."""
    over = []
    timeline.after(seconds, lambda: over.append(True))
    while not over:
        timeline.step()
