"""State-of-the-world discovery as scripts of what Envoy says and we say, and as a property."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.xds import resources, sessions
from extproc.xds.resources import ASSIGNMENT, CLUSTER
from extproc.xds.sessions import Nack, SotwRequest, SotwResponse
from tests.support.seeded import examples
from tests.xds.builders import snapshot


def as_tuples(replies):
    """Responses in short: type, nonce and versions by name; refusals as they are."""
    return [
        (
            reply.type_url,
            reply.nonce,
            {resource.name: resource.version for resource in reply.resources},
        )
        if isinstance(reply, SotwResponse)
        else reply
        for reply in replies
    ]


class SotwScript:
    """One stream; the snapshot is there from the start."""

    def __init__(self, first=None):
        self.conversation = sessions.SotwSession()
        if first is not None:
            self.conversation.publish(first)

    def envoy(self, type_url, *names, nonce="", error=""):
        return as_tuples(self.conversation.request(SotwRequest(type_url, names, nonce, error)))

    def pool(self, *args, **assignments):
        return as_tuples(self.conversation.publish(snapshot(*args, **assignments)))


@pytest.fixture
def script():
    """A stream on which Envoy has taken pool `a` in its first version."""
    session = SotwScript(snapshot(a="1"))
    assert session.envoy(CLUSTER) == [(CLUSTER, "1", {"a": "1"})]
    assert session.envoy(CLUSTER, nonce="1") == []
    assert session.envoy(ASSIGNMENT, "a") == [(ASSIGNMENT, "2", {"a": "1"})]
    assert session.envoy(ASSIGNMENT, "a", nonce="2") == []
    return session


def test_a_change_is_sent_once(script):
    """Endpoints that change go out at once, and not again after they were taken."""
    assert script.pool(a="2") == [(ASSIGNMENT, "3", {"a": "2"})]
    assert script.envoy(ASSIGNMENT, "a", nonce="3") == []
    assert script.pool(a="2") == []


def test_nothing_is_sent_before_the_first_snapshot():
    """A stream that opens before discovery waits, and does not get an empty pool."""
    script = SotwScript()
    assert script.envoy(CLUSTER) == []
    assert script.envoy(ASSIGNMENT, "a") == []
    assert script.pool(a="1") == [(CLUSTER, "1", {"a": "1"}), (ASSIGNMENT, "2", {"a": "1"})]


def test_an_empty_snapshot_is_sent():
    """Envoy waits for its clusters even if there are none."""
    assert SotwScript(snapshot()).envoy(CLUSTER) == [(CLUSTER, "1", {})]


def test_changes_wait_for_the_response_in_flight(script):
    """While Envoy takes one answer, later changes gather and go out as one."""
    assert script.pool(a="2") == [(ASSIGNMENT, "3", {"a": "2"})]
    assert script.pool(a="3") == []
    assert script.pool(a="4") == []
    assert script.envoy(ASSIGNMENT, "a", nonce="3") == [(ASSIGNMENT, "4", {"a": "4"})]
    assert script.envoy(ASSIGNMENT, "a", nonce="4") == []


def test_a_nacked_version_is_not_sent_again(script):
    """A refused version is not sent again; the next change is."""
    assert script.pool(a="bad") == [(ASSIGNMENT, "3", {"a": "bad"})]
    refused = script.envoy(ASSIGNMENT, "a", nonce="3", error="port_value must be positive")
    version = sessions.combined_version({"a": "bad"})
    assert refused == [Nack(ASSIGNMENT, version, "port_value must be positive")]
    assert script.pool(a="bad") == []
    assert script.envoy(ASSIGNMENT, "a", nonce="3") == []
    assert script.pool(a="2") == [(ASSIGNMENT, "4", {"a": "2"})]


def test_returning_to_the_acked_version_sends_nothing(script):
    """Envoy keeps what it had, so going back to that needs no answer."""
    script.pool(a="bad")
    script.envoy(ASSIGNMENT, "a", nonce="3", error="no")
    assert script.pool(a="1") == []
    assert script.pool(a="2") == [(ASSIGNMENT, "4", {"a": "2"})]


def test_a_change_after_a_nack_is_sent(script):
    """A better version that came meanwhile follows the refusal."""
    script.pool(a="bad")
    script.pool(a="2")
    responses = script.envoy(ASSIGNMENT, "a", nonce="3", error="no")
    assert responses[0].error == "no"
    assert responses[1:] == [(ASSIGNMENT, "4", {"a": "2"})]


def test_an_older_nonce_is_ignored(script):
    """A request that crosses an answer is passed over."""
    script.pool(a="2")
    assert script.envoy(ASSIGNMENT, "a", "b", nonce="2") == []
    assert script.envoy(ASSIGNMENT, "a", nonce="2", error="late") == []
    assert script.envoy(ASSIGNMENT, "a", nonce="") == []
    assert script.envoy(ASSIGNMENT, "a", nonce="made up") == []
    assert script.envoy(ASSIGNMENT, "a", nonce="3") == []


def test_a_new_pool_is_a_cluster_first(script):
    """Its endpoints wait until Envoy asks for them, which takes them with the others."""
    assert script.pool(a="1", b="1") == [(CLUSTER, "3", {"a": "1", "b": "1"})]
    assert script.envoy(CLUSTER, nonce="3") == []
    assert script.envoy(ASSIGNMENT, "a", "b", nonce="2") == [
        (ASSIGNMENT, "4", {"a": "1", "b": "1"})
    ]


def test_a_removed_pool_removes_its_cluster(script):
    """The cluster is taken away; its endpoints cannot be and need not be."""
    assert script.pool() == [(CLUSTER, "3", {})]
    assert script.envoy(CLUSTER, nonce="3") == []
    assert script.envoy(ASSIGNMENT, nonce="2") == []


def test_a_warming_cluster_receives_its_endpoints_again(script):
    """Asked again for what was taken, we say it again: Envoy waits for it."""
    assert script.envoy(ASSIGNMENT, "a", nonce="2") == [(ASSIGNMENT, "3", {"a": "1"})]
    assert script.envoy(ASSIGNMENT, "a", nonce="3") == []


def test_an_unsubscribed_name_is_forgotten(script):
    """A name taken from the subscription is not sent, and sent again when it comes back."""
    script.pool(a="1", b="1")
    script.envoy(CLUSTER, nonce="3")
    script.envoy(ASSIGNMENT, "a", "b", nonce="2")
    assert script.envoy(ASSIGNMENT, "a", nonce="4") == []
    assert script.pool(a="1", b="2") == []
    assert script.envoy(ASSIGNMENT, "a", "b", nonce="4") == [
        (ASSIGNMENT, "5", {"a": "1", "b": "2"})
    ]


def test_fewer_names_are_sent_again(script):
    """After a removed and a changed cluster, requested resources are sent again."""
    script.pool(a="1", b="1")
    script.envoy(CLUSTER, nonce="3")
    script.envoy(ASSIGNMENT, "a", "b", nonce="2")
    script.envoy(ASSIGNMENT, "a", "b", nonce="4")
    assert script.envoy(ASSIGNMENT, "b", nonce="4") == [(ASSIGNMENT, "5", {"b": "1"})]


def test_only_named_clusters():
    """Clusters may be asked for by name; the star is all of them, whatever stands beside it."""
    script = SotwScript(snapshot(a="1", b="1"))
    assert script.envoy(CLUSTER, "b", "c") == [(CLUSTER, "1", {"b": "1"})]
    assert script.envoy(CLUSTER, "*", "b", nonce="1") == [(CLUSTER, "2", {"a": "1", "b": "1"})]
    assert script.envoy(CLUSTER, "b", nonce="2") == []
    assert script.pool(a="1", c="1") == [(CLUSTER, "3", {})]


def test_unsubscribing_from_all_clusters_is_not_a_wildcard():
    """An empty list after names is nothing; only the first request may leave it open."""
    script = SotwScript(snapshot(a="1", b="1"))
    script.envoy(CLUSTER, "b")
    assert script.envoy(CLUSTER, nonce="1") == []
    assert script.pool(a="1", c="1") == []
    assert script.envoy(CLUSTER, nonce="1") == [(CLUSTER, "2", {})]
    assert script.envoy(CLUSTER, nonce="2") == []


def test_other_resource_types_are_not_answered(script):
    """Listeners, routes and secrets are not ours; their requests leave the others alone."""
    listener = "type.googleapis.com/envoy.config.listener.v3.Listener"
    assert script.envoy(listener) == []
    assert script.envoy(listener, nonce="9", error="?") == []
    assert script.pool(a="2") == [(ASSIGNMENT, "3", {"a": "2"})]


def test_a_version_depends_on_the_content_only():
    """Two replicas with the same resources say the same version, in whatever order they have them."""
    versions = set()
    for order in (("a", "b"), ("b", "a")):
        conversation = sessions.SotwSession()
        conversation.publish(snapshot(**dict.fromkeys(order, "7")))
        (response,) = conversation.request(SotwRequest(CLUSTER))
        versions.add(response.version)
    assert len(versions) == 1


class SotwEnvoy:
    """Envoy's reactions to responses, as far as the protocol defines them.

    Attributes:
        out: Requests on the way to us, oldest first.
        inbox: Answers on the way to Envoy.
    """

    def __init__(self, bad):
        self.bad = bad
        self.clusters, self.assignments, self.warming = {}, {}, set()
        self.nonces = {CLUSTER: "", ASSIGNMENT: ""}
        self.out, self.inbox = [SotwRequest(CLUSTER)], []
        self.watched = set()

    def take(self):
        answer = self.inbox.pop(0)
        versions = {resource.name: resource.version for resource in answer.resources}
        self.nonces[answer.type_url] = answer.nonce
        error = "bad" if self.bad & set(versions.values()) else ""
        if answer.type_url == ASSIGNMENT:
            if not error:
                mine = {name: version for name, version in versions.items() if name in self.watched}
                self.assignments.update(mine)
                self.warming -= mine.keys()
            self.say(ASSIGNMENT, error)
            return
        if not error:
            self.warming |= {name for name in versions if versions[name] != self.clusters.get(name)}
            self.warming &= versions.keys()
            again = bool(self.warming) or versions.keys() != self.watched
            self.clusters = versions
            self.watched = set(versions)
            self.assignments = {
                name: version for name, version in self.assignments.items() if name in versions
            }
            if again:
                self.say(ASSIGNMENT)
        self.say(CLUSTER, error)

    def say(self, type_url, error=""):
        names = tuple(sorted(self.watched)) if type_url == ASSIGNMENT else ()
        self.out.append(SotwRequest(type_url, names, self.nonces[type_url], error))


class SotwLine:
    """A stream between an Envoy and us."""

    def __init__(self, envoy):
        self.envoy = envoy
        self.conversation = sessions.SotwSession()

    def publish(self, pools):
        clusters = {name: version for name, (version, _) in pools.items()}
        assignments = {name: version for name, (_, version) in pools.items()}
        self.envoy.inbox.extend(self.conversation.publish(snapshot(clusters, **assignments)))

    def move(self, step):
        """One of: we hear a request, Envoy takes an answer, Envoy asks again for endpoints."""
        envoy = self.envoy
        if step == "hear" and envoy.out:
            replies = self.conversation.request(envoy.out.pop(0))
            envoy.inbox.extend(reply for reply in replies if isinstance(reply, SotwResponse))
        elif step == "take" and envoy.inbox:
            envoy.take()
        elif step == "again" and envoy.watched:
            envoy.say(ASSIGNMENT)


VERSIONS = st.sampled_from(["1", "2", "3", "bad"])
POOLS = st.dictionaries(st.sampled_from("abc"), st.tuples(VERSIONS, VERSIONS))
GOOD = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.sampled_from("12"), st.sampled_from("12"))
)


@settings(max_examples=examples(400), deadline=None)
@given(
    steps=st.lists(st.one_of(st.sampled_from(["hear", "take", "again"]), POOLS), max_size=60),
    last=GOOD,
)
def test_envoy_converges_to_the_latest_snapshot(steps, last):
    """Whatever crosses whatever: once all is said, Envoy holds the last pools and waits for none."""
    line = SotwLine(SotwEnvoy({"bad"}))
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
    assert envoy.assignments == {name: version for name, (_, version) in last.items()}
    assert envoy.warming == set()


def test_requests_and_responses_compare_by_value():
    """Requests and responses compare by content."""
    request = SotwRequest(CLUSTER, ("a",), "1", "")
    assert request == msgspec.structs.replace(request)
    assert resources.cluster_name("") == "engines"
    assert resources.cluster_name("llama") == "llama"
