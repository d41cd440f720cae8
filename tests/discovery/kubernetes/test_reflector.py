from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest

from extproc.discovery.kubernetes import api_responses, reflector, settings, store
from extproc.supervision import Supervisor

REF = settings.InferencePoolRef("n", "pool")
AWAY, BUSY, FORBIDDEN = (api_responses.ApiError(status, "no") for status in (0, 503, 403))
LIST = b'{"metadata": {"resourceVersion": "7"}, "items": []}'


class ServerFixture:
    """An API server that answers every list and watch with what a test sets.

    Attributes:
        watch_answer: Answer to watches; None for the answer to lists.
    """

    name = "https://api"
    generation = 1

    def __init__(self):
        self.answer = LIST
        self.watch_answer = None
        self.watched = []

    async def page(self, collection, more):
        return self.answer

    @contextlib.asynccontextmanager
    async def watch(self, collection, version, seconds):
        self.watched.append(version)
        yield self.answer if self.watch_answer is None else self.watch_answer


async def quiet_watch():
    """A watch that the server ends without an event."""
    for chunk in ():
        yield chunk


class FeedFixture:
    """A feed on a clock that a test turns, with the longest pauses that chance allows."""

    def __init__(self):
        self.now = 0.0
        self.states = []
        self.server = ServerFixture()
        wanted = settings.KubernetesSettings(sources=(REF,))
        known = store.ObjectStore(wanted)
        chance = random.Random(1)
        chance.uniform = lambda low, high: high
        self.subject = reflector.Reflector(
            known.collections[0],
            self.server,
            known,
            listener=self,
            settings=wanted,
            clock=lambda: self.now,
            rng=chance,
            supervisor=Supervisor(clock=lambda: self.now),
        )

    def on_changed(self):
        pass

    def on_event(self, kind, detail):
        self.states.append(kind)

    def on_state(self, collection, kind, detail):
        self.states.append(kind)

    def pauses(self, answer, count):
        """Pauses after so many of the same answer."""
        self.server.answer = answer
        pauses = []
        for _ in range(count):
            pauses.append(asyncio.run(self.subject.step()))
            self.now += pauses[-1]
        return pauses

    def watch(self):
        """Runs a watch that the server grants and soon ends."""
        self.server.watch_answer = quiet_watch()
        asyncio.run(self.subject.step())
        self.server.watch_answer = None


def test_reflector_lists_at_once_when_the_api_server_returns():
    """A long outage makes long pauses, which end with the first answer whatever it is."""
    feeding = FeedFixture()
    assert feeding.pauses(LIST, 1) == [0.0]
    assert feeding.pauses(AWAY, 7) == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert feeding.pauses(BUSY, 2) == [0.25, 0.5]


def test_reflector_keeps_its_version_through_403_after_a_restart():
    """For 10 s; then the right is missing, and is looked for every 10 s at most."""
    feeding = FeedFixture()
    feeding.pauses(LIST, 1)
    feeding.watch()
    feeding.pauses(AWAY, 1)
    assert feeding.pauses(FORBIDDEN, 5) == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert set(feeding.states) == {"connected", "disconnected"}
    assert set(feeding.server.watched) == {"7"}
    feeding.pauses(FORBIDDEN, 1)
    assert "forbidden" not in feeding.states
    assert feeding.pauses(FORBIDDEN, 4) == [5.0, 10.0, 10.0, 10.0]
    assert feeding.states[-1] == "forbidden"


@pytest.mark.parametrize("status", [403, 404])
def test_reflector_retries_a_missing_collection_every_10_s(status):
    """A Role or a definition that is applied after the picker is noticed soon."""
    feeding = FeedFixture()
    assert feeding.pauses(api_responses.ApiError(status, "no"), 4) == [5.0, 10.0, 10.0, 10.0]
    assert feeding.states[0] in {"forbidden", "not-installed"}


def test_reflector_stays_forbidden_without_the_right_to_watch():
    """A Role may grant lists alone, which bring the objects now and then, but no changes."""
    feeding = FeedFixture()
    feeding.server.watch_answer = FORBIDDEN
    assert feeding.pauses(LIST, 12)[-5:] == [5.0, 0.0, 10.0, 0.0, 10.0]
    states = [state for state, _ in itertools.groupby(feeding.states)]
    assert states == ["connected", "disconnected", "forbidden"]
    feeding.pauses(LIST, 1)
    feeding.watch()
    assert feeding.states[-1] == "connected"


def test_reflector_stays_forbidden_after_the_right_to_watch_was_lost():
    """The grace after a restart of the API server comes once."""
    feeding = FeedFixture()
    feeding.pauses(LIST, 1)
    feeding.watch()
    feeding.server.watch_answer = FORBIDDEN
    feeding.pauses(LIST, 20)
    states = [state for state, _ in itertools.groupby(feeding.states)]
    assert states == ["connected", "disconnected", "forbidden"]
