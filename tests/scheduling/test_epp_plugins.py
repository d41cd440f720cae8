"""Plugins under upstream names, where a case file cannot say it: memory, and refused parameters."""

import msgspec
import pytest

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.scheduling import attributes, labels, registry
from extproc.scheduling.pickers import MaxScorePicker
from extproc.scheduling.prefix_affinity import NoHitLruScorer
from extproc.scheduling.profile import SchedulerProfile
from tests.scheduling import builders

FLEET = builders.candidates({"a": {}, "b": {}, "c": {}})


def scores(scorer, candidates=FLEET):
    return dict(
        zip(builders.names(candidates), scorer.score(builders.context(), candidates), strict=True)
    )


def send(scorer, name, finalists=FLEET):
    (endpoint,) = [c.endpoint for c in finalists if c.endpoint.name == name]
    request = builders.context().request
    scorer.on_committed(Decision(request, [endpoint], scored_candidates=finalists), 1.0)


def test_new_prompts_go_to_the_least_recent_endpoint():
    """Endpoints without a new prompt come first, then those whose latest is the oldest."""
    scorer = NoHitLruScorer()
    send(scorer, "a")
    assert scores(scorer) == {"b": 1.0, "c": 0.5, "a": 0.0}
    send(scorer, "c")
    send(scorer, "b")
    assert scores(scorer) == {"a": 1.0, "c": 0.5, "b": 0.0}
    send(scorer, "a")
    assert scores(scorer) == {"c": 1.0, "b": 0.5, "a": 0.0}


def test_only_new_prompts_change_the_ranking():
    """Sending a cached prompt does not change the ranking, whichever endpoint gets it."""
    scorer = NoHitLruScorer()
    send(scorer, "a", builders.candidates({"a": {}, "b": {"matched_tokens": 64}}))
    assert scores(scorer) == {"a": 1.0, "b": 0.5, "c": 0.0}


def test_ranks_are_among_the_candidates():
    """Endpoints that are not candidates take no rank."""
    scorer = NoHitLruScorer()
    for name in "abc":
        send(scorer, name)
    assert scores(scorer, FLEET[1:]) == {"b": 1.0, "c": 0.0}


def test_memory_of_new_prompts_is_bounded():
    """Of too many endpoints the one longest ago is forgotten."""
    fleet = builders.candidates({"a": {}, "new": {}, "b": {}, "c": {}})
    for size, order in ((2, ["a", "new", "b", "c"]), (3, ["new", "a", "b", "c"])):
        scorer = NoHitLruScorer(lru_size=size)
        for name in "abc":
            send(scorer, name)
        ranks = scores(scorer, fleet)
        assert sorted(ranks, key=ranks.__getitem__, reverse=True) == order


@pytest.mark.parametrize("kind", ["max-score-picker", "random-picker", "weighted-random-picker"])
def test_a_picker_returns_max_num_of_endpoints(kind):
    """The parameter maxNumOfEndpoints widens the answer and never narrows it."""
    picker = msgspec.convert({"maxNumOfEndpoints": 2}, registry.PICKERS[kind])
    profile = SchedulerProfile("p", (), (), picker)
    assert len(profile.run(builders.context(), FLEET).endpoints) == 2
    assert len(profile.run(builders.context(), FLEET, count=3).endpoints) == 3
    assert len(profile.run(builders.context(), FLEET[:1]).endpoints) == 1
    assert MaxScorePicker().max_num_of_endpoints == 1


THRESHOLD = {"type": "threshold", "threshold": {"operator": "LessThan", "value": 1}}
REFUSED = [
    ("filter", "by-label", {"label": "x"}, "validValues"),
    ("filter", "by-label", {}, "label"),
    ("filter", "endpoint-attribute-filter", {"attribute": "x", "algorithm": THRESHOLD}, "nearest"),
    ("filter", "endpoint-attribute-filter", {"attribute": "waiting"}, "algorithm"),
    (
        "filter",
        "label-selector-filter",
        {"matchExpressions": [{"key": "x", "operator": "In"}]},
        "at least one value for In",
    ),
    (
        "filter",
        "label-selector-filter",
        {"matchExpressions": [{"key": "x", "operator": "Exists", "values": ["y"]}]},
        "no values",
    ),
    ("filter", "utilization-filter", {"conditions": []}, "length >= 1"),
    (
        "filter",
        "utilization-filter",
        {"conditions": [{"metric": "kv-cache-utilization", "maxValue": 80}]},
        "at most 1",
    ),
    ("filter", "prefix-cache-affinity-filter", {"maxTtftPenaltyMs": 1}, "maxTtftPenaltyMs"),
    ("scorer", "active-request-scorer", {"maxBusyScore": 1.5}, "<= 1"),
    ("scorer", "token-load-scorer", {"queueThresholdTokens": 0}, ">= 1"),
    (
        "scorer",
        "endpoint-attribute-scorer",
        {
            "attributeKey": "waiting",
            "algorithm": {
                "type": "linear_lower_is_better",
                "normalization": {"adaptiveRange": {}, "fixedRange": {"min": 0, "max": 1}},
            },
        },
        "at most one",
    ),
    (
        "scorer",
        "endpoint-attribute-scorer",
        {
            "attributeKey": "waiting",
            "algorithm": {
                "type": "linear_lower_is_better",
                "normalization": {"fixedRange": {"min": 1, "max": 1}},
            },
        },
        "min below max",
    ),
    ("picker", "random-picker", {"maxNumOfEndpoints": 0}, ">= 1"),
    ("picker", "round-robin", {"max_models": 0}, ">= 1"),
    ("cost", "estimated-time", {"others_share": -3}, ">= 0"),
    ("cost", "estimated-time", {"crowding_start": 1.0}, "< 1"),
    ("cost", "estimated-time", {"crowding_end": 1.0}, "> 1"),
    ("filter", "conversation-affinity", {"share": 50}, "<= 1"),
    ("filter", "max-waiting", {"max_waiting_requests": -1}, ">= 0"),
    *(
        (
            "filter",
            "session-affinity-filter",
            {"encodedEndpointHeaderConfig": {"header": name}},
            "header for responses",
        )
        for name in ("", "bad header", ":status", "Content-Length")
    ),
    (
        "scorer",
        "header-label-affinity-scorer",
        {"headerName": "transfer-encoding", "labelKey": "zone"},
        "header for responses",
    ),
]
TABLES = {
    "cost": registry.COSTS,
    "filter": registry.FILTERS,
    "scorer": registry.SCORERS,
    "picker": registry.PICKERS,
}


@pytest.mark.parametrize(("role", "kind", "params", "message"), REFUSED)
def test_contradictory_parameters_are_refused(role, kind, params, message):
    """An error names what was wanted, as soon as the plugin is made."""
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(params, TABLES[role][kind])


def test_needs_follow_from_the_parameters():
    """A plugin over named numbers needs the signals of those numbers and no others."""
    convert = msgspec.convert
    metrics = ("active-requests", "kv-cache-utilization")
    conditions = [{"metric": metric, "maxValue": 1} for metric in metrics]
    bounded = convert({"conditions": conditions}, registry.FILTERS["utilization-filter"])
    assert sorted(signal.value for signal in bounded.needs) == ["in_flight", "kv_usage"]
    for name, attribute in attributes.ATTRIBUTES.items():
        params = {"attribute": name, "algorithm": THRESHOLD}
        plugin = convert(params, registry.FILTERS["endpoint-attribute-filter"])
        assert plugin.needs == {attribute.signal}


def test_every_attribute_is_read():
    """Each name leads to a number of a candidate that has them all."""
    known = builders.candidate("a", waiting=1, running=1, kv_usage=0.5, matched_tokens=3)
    for attribute in attributes.ATTRIBUTES.values():
        assert attribute.read(known) is not None


@pytest.mark.parametrize("text", ["", "5", "5-", "-5", "a-b", "9-5", "1-2-3", "1.5-2", "٣-٤"])
def test_labels_without_a_range_are_ignored(text):
    """Only two whole numbers in order make a range."""
    assert labels.parse_context_range(text) is None


def test_unknown_levels_of_a_peer_are_ignored():
    """Unknown levels, and text that is no pair, leave the other levels in effect."""
    assert labels.parse_topology("host = n1 ,planet=earth,rack,zone=") == {"host": "n1"}


RACKS = builders.candidates({"a": {"labels": {"rack": "r1"}}, "b": {"labels": {"rack": "r2"}}})


@pytest.mark.parametrize(
    ("params", "headers", "peer", "names"),
    [
        ({}, {}, None, ["a", "b"]),
        ({}, {"x-peer-topology": "rack=r1"}, None, ["a"]),
        ({}, {}, "r2", ["b"]),
        ({}, {"x-peer-topology": "rack=r1"}, "r2", ["b"]),
        ({}, {"x-peer-topology": "rack=r1"}, "", ["a", "b"]),
        ({"peerTopologyHeader": "X-Near"}, {"x-near": "rack=r1"}, "r2", ["a"]),
        ({"peerTopologyHeader": "X-Near"}, {}, "r2", ["a", "b"]),
    ],
)
def test_the_peer_of_a_stage_is_the_endpoint_that_decodes(params, headers, peer, names):
    """The header counts where it is named, or where no endpoint was chosen before."""
    endpoint = None
    if peer is not None:
        endpoint = Endpoint("10.0.0.9:8000", labels={"rack": peer} if peer else {})
    context = builders.context(headers=headers, peer=endpoint)
    near = msgspec.convert(
        {"minAffinity": "rack", **params}, registry.FILTERS["topology-affinity-filter"]
    )
    assert builders.names(near.filter(context, RACKS)) == names
    if not params:
        scored = registry.SCORERS["topology-affinity-scorer"]().score(context, RACKS)
        assert [0.2 * (len(names) == 1 and n in names) for n in ("a", "b")] == scored
