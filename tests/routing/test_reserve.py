"""Accounts and predictions of a committed decision."""

from __future__ import annotations

import msgspec

from extproc.config import factory
from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import Settings
from extproc.endpoint import Endpoint
from extproc.request import HttpRequest
from extproc.scheduling import plugin_guard

CHAT = HttpRequest(
    {":path": "/v1/chat/completions", ":method": "POST"},
    b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"hello " * 100),
)


class Forgetful:
    """A picker of the first candidate whose observer raises."""

    kind = "forgetful"
    needs = frozenset()

    def pick(self, turn, candidates, totals, *, count):
        return [0]

    def on_committed(self, decision, now):
        raise KeyError(decision.endpoints[0].address)


class Attentive:
    """A picker of the first candidate whose observer records its calls."""

    kind = "attentive"
    needs = frozenset()

    def __init__(self):
        self.heard = []

    def pick(self, turn, candidates, totals, *, count):
        return [0]

    def on_committed(self, decision, now):
        self.heard.append((decision, now))


def test_an_observer_receives_every_committed_decision():
    """With its time, once, and no exception is counted."""
    guards = plugin_guard.GuardFactory(lambda: 0.0, plugin_guard.PluginCounters())
    parts = factory.build(
        Settings(seed=1, scheduling=SchedulingSection(strategy="balanced")), guards=guards
    )
    parts.store.set_endpoints([Endpoint("10.0.0.1:8000")], 1.0)
    observer = Attentive()
    profile = msgspec.structs.replace(parts.profile, picker=observer)
    parts.director.reconfigure(msgspec.structs.replace(parts.director.routing, profile=profile))
    decision = parts.director.route(CHAT, 2.0)
    assert observer.heard == []
    parts.director.reserve(decision, 2.5)
    assert observer.heard == [(decision, 2.5)]
    assert not guards.counts.exceptions


def test_an_observer_that_raises_changes_no_account():
    """The request is charged, believed cached and completed; the exception is counted."""
    guards = plugin_guard.GuardFactory(lambda: 0.0, plugin_guard.PluginCounters())
    parts = factory.build(
        Settings(seed=1, scheduling=SchedulingSection(strategy="balanced")), guards=guards
    )
    parts.store.set_endpoints([Endpoint("10.0.0.1:8000")], 1.0)
    profile = msgspec.structs.replace(parts.profile, picker=Forgetful())
    parts.director.reconfigure(msgspec.structs.replace(parts.director.routing, profile=profile))
    account = parts.store.pool.members[0].account

    reservation = parts.director.reserve(parts.director.route(CHAT, 2.0), 2.0)

    assert account.in_flight == 1
    assert parts.index.blocks_total > 0
    assert guards.counts.exceptions == {("observer", "forgetful"): 1}
    parts.director.release(reservation, 3.0)
    assert account.in_flight == 0
