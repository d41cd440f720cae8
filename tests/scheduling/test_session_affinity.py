import base64

import msgspec
import pytest

from extproc.decision import Decision
from extproc.discovery.kubernetes import pool_views
from extproc.discovery.kubernetes.objects import Pod
from extproc.scheduling import session_affinity
from extproc.scheduling.labels import HeaderLabelAffinityScorer
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.profile import SchedulerProfile
from extproc.scheduling.session_affinity import SessionAffinityFilter, SessionAffinityScorer
from tests.scheduling import builders

FLEET = builders.candidates({"a": {}, "b": {}, "c": {}})
BY_ID = {"strategy": "session_id"}


def plugin(cls, **params):
    return msgspec.convert(params, cls)


def profiles(**params):
    filtering = SchedulerProfile(
        "f", (plugin(SessionAffinityFilter, **params),), (), MaxScorePicker()
    )
    scorer = plugin(SessionAffinityScorer, **params)
    return [filtering, SchedulerProfile("s", (), ((scorer, 1.0),), MaxScorePicker())]


def decide(profile, now=100.0, seed=1, **facts):
    return profile.run(builders.context(seed, now=now, **facts), FLEET)


def commit(profile, decision, now=100.0):
    for observer in profile.observers:
        observer.on_committed(decision, now)


@pytest.mark.parametrize("profile", profiles(), ids=["filter", "scorer"])
def test_a_client_that_sends_its_token_back_stays(profile):
    """The answer's token brings the next request to the same endpoint, without any memory."""
    first = decide(profile)
    (header, token), *others = first.answer_headers
    assert (header, others) == ("x-session-token", [])
    for seed in range(20):
        again = decide(profile, seed=seed, headers={header: token})
        assert again.endpoints == first.endpoints
        assert again.answer_headers == first.answer_headers
    assert first.plugin_keys == {}


@pytest.mark.parametrize("profile", profiles(**BY_ID), ids=["filter", "scorer"])
def test_a_committed_session_stays_until_it_expires(profile):
    """A session sticks to where it was sent, as long as it is used every 300 seconds."""
    request = {"headers": {"x-session-id": "s1"}}
    first = decide(profile, **request)
    assert first.answer_headers == ()
    commit(profile, first, 100.0)
    for seed in range(20):
        assert decide(profile, 400.0, seed, **request).endpoints == first.endpoints
    late = {
        builders.names(decide(profile, 400.1, seed, **request).endpoints)[0] for seed in range(40)
    }
    assert late == {"a", "b", "c"}


@pytest.mark.parametrize("profile", profiles(**BY_ID), ids=["filter", "scorer"])
def test_a_dry_run_binds_no_session(profile):
    """Deciding without committing leaves the session free."""
    request = {"headers": {"x-session-id": "s1"}}
    names = {
        builders.names(decide(profile, seed=seed, **request).endpoints)[0] for seed in range(40)
    }
    assert names == {"a", "b", "c"}


def test_a_turn_that_went_elsewhere_leaves_the_session_bound():
    """A session moves once its endpoint is no candidate, or was not used for 300 seconds."""
    (_, profile), request = profiles(**BY_ID), builders.context(headers={"x-session-id": "s"})
    (observer,) = profile.observers

    def turn(candidates, now, *, elsewhere=False):
        decision = profile.run(msgspec.structs.replace(request, now=now), candidates)
        if elsewhere:
            other = next(c.endpoint for c in candidates if c.endpoint != decision.endpoints[0])
            decision = msgspec.structs.replace(decision, endpoints=[other])
        observer.on_committed(decision, now)
        return decision.endpoints[0]

    home = turn(FLEET, 100.0)
    assert turn(FLEET, 200.0, elsewhere=True) != home
    assert turn(FLEET, 300.0) == home
    without = [candidate for candidate in FLEET if candidate.endpoint != home]
    moved = turn(without, 400.0)
    assert turn(FLEET, 500.0) == moved
    turn(FLEET, 800.0, elsewhere=True)
    late = turn(FLEET, 800.1, elsewhere=True)
    assert turn(FLEET, 900.0) == late


def test_the_first_source_that_is_set_names_the_session():
    """Headers and what the parsers found are asked in the order of the configuration."""
    sources = [{"header": "X-Chat"}, {"attribute": "agent-identity"}]
    profile = profiles(**BY_ID, sessionIdConfig={"sources": sources})[1]
    by_header = decide(profile, headers={"x-chat": "one"}, session="two")
    by_parser = decide(profile, headers={}, session="two")
    assert list(by_header.plugin_keys.values()) == ["one"]
    assert list(by_parser.plugin_keys.values()) == ["two"]
    assert decide(profile).plugin_keys == {}


def test_plugins_with_different_sources_are_independent():
    """Two plugins of one profile do not take each other's sessions."""
    other = plugin(SessionAffinityFilter, **BY_ID, sessionIdConfig={"sources": [{"header": "x-b"}]})
    profile = SchedulerProfile(
        "p", (plugin(SessionAffinityFilter, **BY_ID), other), (), MaxScorePicker()
    )
    decision = decide(profile, headers={"x-session-id": "one", "x-b": "two"})
    assert sorted(decision.plugin_keys.values()) == ["one", "two"]


def test_sessions_are_bounded_by_number():
    """Of too many sessions the longest unused is forgotten."""
    memory = session_affinity.SessionTable(10.0)
    memory.bind("first", "x:1", 0.0)
    for i in range(session_affinity.MOST_SESSIONS - 1):
        memory.bind(str(i), "x:1", 1.0)
    memory.bind("first", "y:1", 1.0)
    memory.bind("last", "x:1", 1.0)
    assert len(memory) == session_affinity.MOST_SESSIONS
    assert [memory.find(name, 1.0) for name in ("first", "0", "1")] == ["y:1", "", "x:1"]


def test_sessions_are_bounded_by_age():
    """Sessions that were unused for long are removed when another one is added."""
    memory = session_affinity.SessionTable(10.0)
    for now, session in enumerate("abca"):
        memory.bind(session, "x:1", float(now))
    memory.bind("d", "x:1", 12.5)
    assert [bool(memory.find(session, 12.5)) for session in "abcd"] == [True, False, False, True]
    assert len(memory) == 2


def pods_of(*names, ports):
    """Candidates of a pool of pods, the nth of which has the IP 10.0.0.n."""
    pods = [
        Pod(name=name, namespace="models", uid=name, ip=f"10.0.0.{number}", ready=True)
        for number, name in enumerate(names, start=1)
    ]
    endpoints = [endpoint for pod in pods for endpoint in pool_views.pod_endpoints(pod, ports)]
    template = builders.candidate("x")
    return [msgspec.structs.replace(template, endpoint=endpoint) for endpoint in endpoints]


@pytest.mark.parametrize(
    ("names", "ports", "text", "address"),
    [
        (("v-0", "v-1"), (8000,), "models/v-1-rank-0", "10.0.0.2:8000"),
        (("v-0", "v-1"), (8000,), "v-1-rank-0", "10.0.0.2:8000"),
        (("v-0", "v-1"), (8000,), "models/v-1", "10.0.0.2:8000"),
        (("v-0", "v-1"), (8000,), "models/v-1-rank-1", ""),
        (("v-0", "v-1"), (8000,), "-rank-0", ""),
        (("v-0", "v-0-rank-0"), (8000,), "models/v-0-rank-0", "10.0.0.2:8000"),
        (("v-0", "v-1"), (8000, 8001), "models/v-1-rank-0", "10.0.0.2:8000"),
        (("v-0", "v-1"), (8000, 8001), "models/v-1-rank-1", "10.0.0.2:8001"),
    ],
)
def test_tokens_of_the_upstream_picker_name_ranks(names, ports, text, address):
    """Upstream calls the only port of a pod a rank as well, so that its sessions survive a change."""
    token = base64.b64encode(text.encode()).decode()
    assert session_affinity.find_candidate(token, pods_of(*names, ports=ports)) == address


def test_invalid_tokens_are_ignored():
    """Whatever a client sends as a token, there is an answer."""
    for token in ("", "%%%", "YQ", "w6TDtsO8", "/w==", "é", "Lw=="):
        assert session_affinity.find_candidate(token, FLEET) == ""


@pytest.mark.parametrize(
    ("cookies", "session"),
    [
        ("a=b; sid=abc", "abc"),
        ("sid = x=y ;sid=z", "x=y"),
        ("SID=abc; asid=b; sid", ""),
        ("", ""),
    ],
)
def test_a_cookie_may_name_the_session(cookies, session):
    """Of the cookies in the header, that of the configured name counts, and the first of several."""
    profile = profiles(**BY_ID, sessionIdConfig={"sources": [{"cookie": "sid"}]})[1]
    keys = decide(profile, headers={"cookie": cookies}).plugin_keys
    assert list(keys.values()) == ([session] if session else [])


@pytest.mark.parametrize(
    "source", [{}, {"header": "x", "attribute": "y"}, {"header": "x", "cookie": "y"}]
)
def test_a_source_has_exactly_one_location(source):
    """A source without a place, or with two, is refused."""
    with pytest.raises(msgspec.ValidationError, match="one of header, attribute and cookie"):
        msgspec.convert({"sources": [source]}, session_affinity.SessionId)


def test_the_label_of_the_endpoint_is_a_response_header():
    """header-label-affinity adds a response header where it has a label, unless that is disabled."""
    labelled = builders.candidate("z", labels={"zone": "eu"}).endpoint
    scorer = HeaderLabelAffinityScorer(header_name="X-Zone", label_key="zone")
    assert scorer.answer_headers(builders.context(), labelled) == (("x-zone", "eu"),)
    assert scorer.answer_headers(builders.context(), FLEET[0].endpoint) == ()
    silent = msgspec.structs.replace(scorer, stamp_response_header=False)
    assert silent.answer_headers(builders.context(), labelled) == ()


def test_a_decision_without_keys_binds_no_session():
    """A decision made without this plugin, such as a rescue, is no reason to fail."""
    scorer = plugin(SessionAffinityScorer, **BY_ID)
    scorer.on_committed(Decision(builders.context().request, [FLEET[0].endpoint]), 1.0)
    assert len(scorer.memory) == 0


@pytest.mark.parametrize("profile", profiles(**BY_ID), ids=["filter", "scorer"])
def test_a_session_follows_its_request_to_a_fallback(profile):
    """Unless a later turn of it has gone to another endpoint."""
    first = decide(profile, headers={"x-session-id": "s"})
    commit(profile, first)
    (observer,) = profile.observers
    fallback, later = [c.endpoint for c in FLEET if c.endpoint is not first.endpoints[0]]
    observer.on_moved(first, fallback, 100.0)
    again = decide(profile, headers={"x-session-id": "s"})
    assert again.endpoints == [fallback]
    observer.on_moved(first, later, 100.0)
    assert decide(profile, headers={"x-session-id": "s"}).endpoints == [fallback]


@pytest.mark.parametrize("strategy", ["encoded_endpoint_header", "session_id"])
def test_a_move_without_a_session_binds_nothing(strategy):
    """Neither a decision without keys nor a strategy without a memory has a session to move."""
    scorer = plugin(SessionAffinityScorer, strategy=strategy)
    decision = Decision(builders.context().request, [FLEET[0].endpoint])
    scorer.on_moved(decision, FLEET[1].endpoint, 1.0)
    assert len(scorer.memory) == 0
