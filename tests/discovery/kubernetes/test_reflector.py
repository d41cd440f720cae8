from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest

from extproc.discovery.kubernetes import api_responses, reflector, settings, store, watch_plan
from extproc.supervision import Supervisor

REF = settings.InferencePoolRef("n", "pool")
AWAY, BUSY, FORBIDDEN = (api_responses.ApiError(status, "no") for status in (0, 503, 403))
LIST = b'{"metadata": {"resourceVersion": "7"}, "items": []}'
BOOKMARK = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}\n'


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
        self.limits = []

    async def page(self, collection, more, *, limit):
        self.limits.append(limit)
        return self.answer

    @contextlib.asynccontextmanager
    async def watch(self, collection, version, seconds):
        self.watched.append(version)
        yield self.answer if self.watch_answer is None else self.watch_answer


async def watch_of(*chunks):
    """A watch that the server ends after some bytes."""
    for chunk in chunks:
        yield chunk


class FeedFixture:
    """A feed on a clock that a test turns, with the longest pauses that chance allows."""

    def __init__(self, resource=watch_plan.POOLS):
        self.now = 0.0
        self.states = []
        self.server = ServerFixture()
        wanted = settings.KubernetesSettings(sources=(REF,))
        known = self.known = store.ObjectStore(wanted)
        (collection,) = [watch for watch in known.collections if watch.resource == resource]
        chance = random.Random(1)
        chance.uniform = lambda low, high: high
        self.subject = reflector.Reflector(
            collection,
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

    @property
    def is_synced(self):
        return self.known.is_synced(self.subject.collection)

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

    def watch(self, *chunks):
        """Runs a watch that the server grants and soon ends; returns the pause."""
        self.server.watch_answer = watch_of(*chunks)
        pause = asyncio.run(self.subject.step())
        self.server.watch_answer = None
        return pause


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
    feeding.watch(BOOKMARK)
    feeding.pauses(AWAY, 1)
    assert feeding.pauses(FORBIDDEN, 5) == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert set(feeding.states) == {"connected", "disconnected"}
    assert feeding.server.limits == [500, *[1] * 5]
    feeding.pauses(FORBIDDEN, 1)
    assert "forbidden" not in feeding.states
    assert feeding.pauses(FORBIDDEN, 4) == [5.0, 10.0, 10.0, 10.0]
    assert feeding.states[-1] == "forbidden"


@pytest.mark.parametrize(
    ("version", "watched"),
    [(b"8", ["7", "8"]), (b"10", ["7", "8"]), (b"x", ["7", "8"]), (b"6", ["7", "6"])],
)
def test_reflector_lists_again_where_a_store_was_restored(version, watched):
    """A server at an older version grants the watch, and would leave out changes."""
    feeding = FeedFixture()
    feeding.pauses(LIST, 1)
    feeding.watch(BOOKMARK)
    feeding.pauses(AWAY, 2)
    feeding.server.answer = LIST.replace(b"7", version)
    feeding.watch(BOOKMARK)
    feeding.watch(BOOKMARK)
    assert feeding.server.watched[:1] + feeding.server.watched[-1:] == watched
    assert ("relisted" in feeding.states) == (version == b"6")


@pytest.mark.parametrize(
    "answer", [b"{", *(api_responses.ApiError(status, "no") for status in (0, 403, 429, 500, 503))]
)
def test_reflector_watches_while_lists_fail_after_an_outage(answer):
    """A failed check of the version is no failure of the watch, and comes again before the next."""
    feeding = FeedFixture()
    feeding.pauses(LIST, 1)
    feeding.pauses(BUSY, 1)
    feeding.states.clear()
    feeding.server.answer = answer
    pauses = [feeding.watch(BOOKMARK) for _ in range(4)]
    assert pauses == [0.25] * 4
    assert feeding.server.watched == ["7", "7", "8", "8", "8"]
    assert set(feeding.states) == {"connected"}
    feeding.server.answer = LIST.replace(b"7", b"6")
    feeding.watch(BOOKMARK)
    assert "relisted" in feeding.states


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
    feeding.watch(BOOKMARK)
    assert feeding.states[-1] == "connected"


def test_reflector_stays_forbidden_after_the_right_to_watch_was_lost():
    """The grace after a restart of the API server comes once."""
    feeding = FeedFixture()
    feeding.pauses(LIST, 1)
    feeding.watch(BOOKMARK)
    feeding.server.watch_answer = FORBIDDEN
    feeding.pauses(LIST, 20)
    states = [state for state, _ in itertools.groupby(feeding.states)]
    assert states == ["connected", "disconnected", "forbidden"]


def test_reflector_lists_again_after_watches_that_end_at_once():
    """They bring no changes, so the collection is not in step until one brings a line."""
    feeding = FeedFixture()
    feeding.pauses(LIST, 1)
    assert [feeding.watch() for _ in range(3)] == [0.25, 0.5, 1.0]
    feeding.pauses(LIST, 1)
    feeding.watch()
    assert feeding.server.watched == ["7"] * 4
    assert feeding.states == [*["connected"] * 4, "disconnected"]
    feeding.watch(BOOKMARK)
    assert feeding.states[-1] == "connected"


def test_reflector_is_connected_while_a_watch_goes_on(monkeypatch):
    """After some that ended at once, a quiet one counts once it was open for a moment."""
    monkeypatch.setattr(reflector, "_MIN_WATCH_S", 0.01)
    feeding = FeedFixture()
    feeding.pauses(LIST, 1)
    for _ in range(3):
        feeding.watch()
    feeding.pauses(LIST, 1)
    assert feeding.states[-1] == "disconnected"

    async def scene():
        ended = asyncio.Event()

        async def quiet():
            await ended.wait()
            yield b""

        def on_state(collection, kind, detail):
            feeding.states.append(kind)
            ended.set()

        feeding.on_state = on_state
        feeding.server.watch_answer = quiet()
        await feeding.subject.step()

    asyncio.run(scene())
    assert feeding.states[-1] == "connected"


def test_reflector_gives_up_waiting_for_an_optional_collection_that_fails():
    """Its conversion webhook may be down, for which no pool has to wait; a list still counts."""
    feeding = FeedFixture(watch_plan.OBJECTIVES)
    feeding.pauses(AWAY, 20)
    feeding.pauses(BUSY, 6)
    assert (feeding.is_synced, feeding.states[-1]) == (False, "disconnected")
    feeding.pauses(BUSY, 3)
    assert (feeding.is_synced, feeding.states[-1]) == (True, "disconnected")
    assert feeding.pauses(LIST, 1) == [0.0]
    pools = FeedFixture()
    pools.pauses(BUSY, 20)
    assert not pools.is_synced


@pytest.mark.parametrize(
    "answers",
    [(AWAY,), (AWAY, BUSY), (api_responses.ApiError(429, "no"),), (b"{",), (b"{", AWAY, BUSY)],
)
def test_reflector_gives_up_waiting_whatever_the_failure_of_lists(answers):
    """Answers in turn count together; no answer counts if the server has answered for others."""
    feeding = FeedFixture(watch_plan.OBJECTIVES)
    for collection in feeding.known.collections:
        if not collection.resource.optional:
            feeding.known.replace(collection, ())
    for answer in itertools.cycle(answers):
        feeding.pauses(answer, 1)
        if feeding.is_synced or feeding.now > 60.0:
            break
    assert feeding.is_synced
    assert 15.0 <= feeding.now < 30.0
