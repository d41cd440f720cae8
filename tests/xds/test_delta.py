"""Incremental discovery as scripts of what Envoy says and we say, and as a property."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.xds import sessions
from extproc.xds.resources import ASSIGNMENT, CLUSTER
from extproc.xds.sessions import DeltaRequest, DeltaResponse, Nack
from tests.support.seeded import examples
from tests.xds.builders import snapshot


def as_tuples(replies):
    """Responses in short: type, nonce, versions by name, removed names."""
    return [
        (
            reply.type_url,
            reply.nonce,
            {resource.name: resource.version for resource in reply.resources},
            set(reply.removed),
        )
        if isinstance(reply, DeltaResponse)
        else reply
        for reply in replies
    ]


class DeltaScript:
    """One stream; the snapshot is there from the start."""

    def __init__(self, first=None):
        self.conversation = sessions.DeltaSession()
        if first is not None:
            self.conversation.publish(first)

    def envoy(self, type_url, *subscribe, **fields):
        return as_tuples(self.conversation.request(DeltaRequest(type_url, subscribe, **fields)))

    def pool(self, *args, **assignments):
        return as_tuples(self.conversation.publish(snapshot(*args, **assignments)))


@pytest.fixture
def script():
    """A stream on which Envoy has taken pools `a` and `b` in their first version."""
    session = DeltaScript(snapshot(a="1", b="1"))
    assert session.envoy(CLUSTER) == [(CLUSTER, "1", {"a": "1", "b": "1"}, set())]
    assert session.envoy(CLUSTER, nonce="1") == []
    assert session.envoy(ASSIGNMENT, "a", "b") == [(ASSIGNMENT, "2", {"a": "1", "b": "1"}, set())]
    assert session.envoy(ASSIGNMENT, nonce="2") == []
    return session


def test_only_changed_resources_are_sent(script):
    """A pool that stays is not repeated."""
    assert script.pool(a="1", b="2") == [(ASSIGNMENT, "3", {"b": "2"}, set())]
    assert script.envoy(ASSIGNMENT, nonce="3") == []


def test_changes_wait_for_the_response_in_flight(script):
    """While Envoy takes one answer, later changes gather."""
    assert script.pool(a="2", b="1") == [(ASSIGNMENT, "3", {"a": "2"}, set())]
    assert script.pool(a="3", b="3") == []
    assert script.envoy(ASSIGNMENT, nonce="3") == [(ASSIGNMENT, "4", {"a": "3", "b": "3"}, set())]


def test_removed_resources_are_sent(script):
    """A pool that goes is removed by name, for both types."""
    assert script.pool(a="1") == [
        (CLUSTER, "3", {}, {"b"}),
        (ASSIGNMENT, "4", {}, {"b"}),
    ]
    assert script.envoy(CLUSTER, nonce="3") == []
    assert script.envoy(ASSIGNMENT, nonce="4", unsubscribe=("b",)) == []


def test_names_of_a_subscription_are_bounded():
    """Requests add names up; those beyond the bound are not answered, the others still are."""
    session = DeltaScript(snapshot(a="1"))
    many = tuple(f"n{at}" for at in range(sessions.MAX_NAMES))
    ((_, nonce, versions, absent),) = session.envoy(ASSIGNMENT, "a", *many)
    assert (versions, len(absent)) == ({"a": "1"}, sessions.MAX_NAMES - 1)
    assert session.envoy(ASSIGNMENT, "late", nonce=nonce) == []
    assert session.envoy(ASSIGNMENT, "late", "a", unsubscribe=many) == [
        (ASSIGNMENT, "2", {"a": "1"}, set())
    ]


def test_a_nacked_version_is_not_sent_again(script):
    """A refused version is not sent again; another version is."""
    script.pool(a="bad", b="1")
    assert script.envoy(ASSIGNMENT, nonce="3", error="no") == [Nack(ASSIGNMENT, "3", "no")]
    assert script.pool(a="bad", b="2") == [(ASSIGNMENT, "4", {"b": "2"}, set())]
    assert script.envoy(ASSIGNMENT, nonce="4") == []
    assert script.pool(a="2", b="2") == [(ASSIGNMENT, "5", {"a": "2"}, set())]


def test_an_invalid_resource_does_not_block_others(script):
    """After a refusal of several, each is sent alone; only the bad one stays away."""
    script.pool(a="bad", b="2")
    refused = Nack(ASSIGNMENT, "3", "no")
    assert script.envoy(ASSIGNMENT, nonce="3", error="no") == [
        refused,
        (ASSIGNMENT, "4", {"a": "bad"}, set()),
    ]
    assert script.envoy(ASSIGNMENT, nonce="4", error="no") == [
        Nack(ASSIGNMENT, "4", "no"),
        (ASSIGNMENT, "5", {"b": "2"}, set()),
    ]
    assert script.envoy(ASSIGNMENT, nonce="5") == []


def test_a_repeated_subscription_is_sent_again(script):
    """A cluster that warms anew waits for endpoints that it had."""
    assert script.envoy(ASSIGNMENT, "a") == [(ASSIGNMENT, "3", {"a": "1"}, set())]


def test_an_unknown_name_is_removed(script):
    """Envoy learns that a requested resource does not exist, and gets it when it does."""
    assert script.envoy(ASSIGNMENT, "c") == [(ASSIGNMENT, "3", {}, {"c"})]
    assert script.envoy(ASSIGNMENT, nonce="3") == []
    responses = script.pool(a="1", b="1", c="1")
    assert responses == [(CLUSTER, "4", {"c": "1"}, set()), (ASSIGNMENT, "5", {"c": "1"}, set())]


def test_a_name_that_is_unsubscribed_under_a_wildcard_is_answered(script):
    """Envoy learns whether the name is still one of all clusters, or exists no longer."""
    assert script.envoy(CLUSTER, "a", "c") == [(CLUSTER, "3", {"a": "1"}, {"c"})]
    assert script.envoy(CLUSTER, nonce="3") == []
    assert script.envoy(CLUSTER, unsubscribe=("a", "c")) == [(CLUSTER, "4", {"a": "1"}, {"c"})]
    assert script.envoy(CLUSTER, nonce="4") == []
    assert script.envoy(CLUSTER, unsubscribe=("a", "c", "d")) == []
    assert script.pool(a="1", b="1", c="1") == [(CLUSTER, "5", {"c": "1"}, set())]


@pytest.mark.parametrize("error", ["", "no"])
@pytest.mark.parametrize("type_url", [CLUSTER, ASSIGNMENT])
def test_unsubscribed_names_leave_nothing(type_url, error):
    """A stream that asks for ever other names, of which none exists, takes no more memory."""
    script = DeltaScript(snapshot())
    script.envoy(type_url)
    script.envoy(type_url, nonce="1")

    def ask_for_names(num_names):
        for at in range(num_names):
            name = f"n{at}"
            for request in ({"subscribe": (name,)}, {"unsubscribe": (name,)}):
                for reply in script.conversation.request(DeltaRequest(type_url, **request)):
                    script.envoy(type_url, nonce=reply.nonce, error=error)

    ask_for_names(1)
    tracemalloc.start()
    try:
        ask_for_names(1000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 30_000
    finally:
        tracemalloc.stop()


def test_a_reconnected_envoy_receives_only_differences():
    """An Envoy from another replica gets only the differences, and always an answer."""
    script = DeltaScript(snapshot(a="1", b="2"))
    queued = {"a": "1", "b": "1", "c": "1"}
    assert script.envoy(CLUSTER, initial_versions={"a": "1", "b": "1"}) == [
        (CLUSTER, "1", {}, set())
    ]
    assert script.envoy(ASSIGNMENT, "a", "b", "c", initial_versions=queued) == [
        (ASSIGNMENT, "2", {"b": "2"}, {"c"})
    ]


def test_nothing_is_sent_before_the_first_snapshot():
    """A stream that opens before discovery has spoken waits."""
    script = DeltaScript()
    assert script.envoy(CLUSTER) == []
    assert script.envoy(ASSIGNMENT, "a") == []
    assert script.pool() == [(CLUSTER, "1", {}, set()), (ASSIGNMENT, "2", {}, {"a"})]


def test_an_older_nonce_is_ignored(script):
    """A late word on an answer that is no longer under way changes nothing."""
    script.pool(a="2", b="1")
    assert script.envoy(ASSIGNMENT, nonce="2", error="late") == []
    assert script.envoy(ASSIGNMENT, nonce="made up") == []
    assert script.envoy(ASSIGNMENT, nonce="3") == []


def test_other_resource_types_are_not_answered(script):
    """Listeners, routes and secrets are not ours."""
    assert script.envoy("type.googleapis.com/envoy.config.listener.v3.Listener") == []


class DeltaEnvoy:
    """Envoy's reactions to responses, as far as the protocol defines them."""

    def __init__(self, held=None):
        self.clusters, self.assignments, self.waiting = {}, {}, set()
        self.watched = set()
        self.out, self.inbox = [DeltaRequest(CLUSTER)], []

    def take(self):
        answer = self.inbox.pop(0)
        versions = {resource.name: resource.version for resource in answer.resources}
        bad = "bad" in versions.values()
        mine = self.clusters if answer.type_url == CLUSTER else self.assignments
        before = dict(self.clusters)
        if not bad:
            mine.update(versions)
            for name in answer.removed:
                mine.pop(name, None)
        self.out.append(
            DeltaRequest(answer.type_url, nonce=answer.nonce, error="bad" if bad else "")
        )
        if answer.type_url == CLUSTER:
            changed = {n for n, version in self.clusters.items() if before.get(n) != version}
            gone = self.watched - self.clusters.keys()
            self.watched = set(self.clusters)
            self.waiting = (self.waiting | changed) & self.watched
            for name in gone:
                self.assignments.pop(name, None)
            if changed or gone:
                self.out.append(DeltaRequest(ASSIGNMENT, tuple(changed), tuple(gone)))
        else:
            self.waiting -= versions.keys() if not bad else set()


VERSIONS = st.sampled_from(["1", "2", "3", "bad"])
POOLS = st.dictionaries(st.sampled_from("abc"), st.tuples(VERSIONS, VERSIONS))
GOOD = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.sampled_from("12"), st.sampled_from("12"))
)


class DeltaLine:
    """A stream between an Envoy and us."""

    def __init__(self):
        self.envoy = DeltaEnvoy()
        self.conversation = sessions.DeltaSession()

    def publish(self, pools):
        clusters = {name: version for name, (version, _) in pools.items()}
        assignments = {name: version for name, (_, version) in pools.items()}
        self.envoy.inbox.extend(self.conversation.publish(snapshot(clusters, **assignments)))

    def move(self, step):
        """Either we hear a request, or Envoy takes an answer."""
        envoy = self.envoy
        if step == "hear" and envoy.out:
            replies = self.conversation.request(envoy.out.pop(0))
            envoy.inbox.extend(reply for reply in replies if isinstance(reply, DeltaResponse))
        elif step == "take" and envoy.inbox:
            envoy.take()


@settings(max_examples=examples(400), deadline=None)
@given(steps=st.lists(st.one_of(st.sampled_from(["hear", "take"]), POOLS), max_size=60), last=GOOD)
def test_envoy_converges_to_the_latest_snapshot(steps, last):
    """Whatever crosses whatever: once all is said, Envoy holds the last pools and waits for none."""
    line = DeltaLine()
    for step in steps:
        if isinstance(step, dict):
            line.publish(step)
        else:
            line.move(step)
    line.publish(last)
    for _ in range(500):
        line.move("hear")
        line.move("take")
    envoy = line.envoy
    assert not envoy.out, "it never falls silent"
    assert not envoy.inbox
    assert envoy.clusters == {name: version for name, (version, _) in last.items()}
    assert {name: envoy.assignments.get(name) for name in last} == {
        name: version for name, (_, version) in last.items()
    }
    assert envoy.waiting == set()
