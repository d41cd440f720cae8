from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cli import check
from extproc.config import pool_annotations
from extproc.errors import ConfigError
from extproc.routing import pool_match
from extproc.routing.pool_match import PoolMatch
from tests.support import config_text, linear_match

KEY = "team-a/llama"


def read(rules):
    return config_text.read(f"cluster: {{discover_pools: cluster, match_rules: {rules}}}")


def granted(rules, key=KEY, **annotations):
    stated = {f"extproc/{kind}": text for kind, text in annotations.items()}
    return pool_annotations.grant_match(read(rules).cluster.match_rules, key, stated)


def test_annotations_are_ignored_without_a_match_rule():
    """A user who may write an InferencePool cannot take requests of others."""
    for rules in ("[]", "[{pools: ['team-b/*']}]"):
        refused = granted(rules, models="*")
        assert refused.match.is_empty
        assert refused.rejection == "model * has no rule in cluster.match_rules"
    assert granted("[]") == pool_annotations.MatchGrant()


@pytest.mark.parametrize(
    ("annotations", "claim"),
    [
        ({}, PoolMatch()),
        ({"hosts": " A.example , *.b "}, PoolMatch(hosts=("a.example", "*.b"))),
        (
            {"paths": "/a,/b", "models": "m", "headers": "X-Team=a"},
            PoolMatch(paths=("/a", "/b"), models=("m",), headers={"x-team": "a"}),
        ),
        ({"hosts": ","}, PoolMatch()),
    ],
)
def test_matches_of_annotations_are_read(annotations, claim):
    """Lists with commas; hosts and header names in lower case. A rule of pools alone is trust."""
    assert granted("[{pools: ['*']}]", **annotations) == pool_annotations.MatchGrant(claim)


@pytest.mark.parametrize(
    ("rule", "annotations", "holds"),
    [
        ("hosts: ['*.a.example']", {"hosts": "x.a.example, *.y.a.example"}, True),
        ("hosts: ['*.a.example']", {"hosts": "*.a.example", "models": "m"}, True),
        ("hosts: ['*.a.example']", {"hosts": "x.a.example, b.example"}, False),
        ("hosts: ['*.a.example']", {"hosts": "a.example"}, False),
        ("hosts: ['*.a.example']", {"models": "m"}, False),
        ("hosts: ['{namespace}.example']", {"hosts": "team-a.example"}, True),
        ("hosts: ['{namespace}.example']", {"hosts": "team-b.example"}, False),
        ("models: ['{name}-*']", {"models": "llama-8b,llama-70b-*"}, True),
        ("models: ['{name}-*']", {"models": "llama*"}, False),
        ("models: [llama]", {"models": "llama*"}, False),
        ("paths: [/a]", {"paths": "/a/b"}, True),
        ("paths: [/a]", {"paths": "/ab"}, False),
        ("paths: [/a]", {"paths": "/"}, False),
        ("headers: {X-Team: a}", {"headers": "x-team=a,x-more=1"}, True),
        ("headers: {X-Team: a}", {"headers": "x-team=b"}, False),
        ("hosts: [a], models: [m]", {"hosts": "a"}, False),
    ],
)
def test_matches_outside_of_the_rules_are_ignored(rule, annotations, holds):
    """Each kind that the rule names limits the claim; what is too much is ignored as a whole."""
    grant = granted(f"[{{pools: ['team-a/*'], {rule}}}]", **annotations)
    assert grant.match.is_empty is not holds
    assert bool(grant.rejection) is not holds


@pytest.mark.parametrize(
    ("annotations", "text"),
    [
        ({"hosts": ",".join(f"h{number}" for number in range(65))}, "has 65 entries"),
        ({"models": "m" * 257}, "more than 256 characters"),
        ({"headers": "x-team"}, "no list of name=value"),
    ],
)
def test_matches_are_bounded(annotations, text):
    """Every request is held against all conditions."""
    assert text in granted("[{pools: ['*']}]", **annotations).rejection


def test_a_rejection_repeats_the_beginning_of_a_match():
    """A match may have 256 conditions of 256 characters; its rejection is one line of the log."""
    refused = granted("[]", models=",".join(f"{number:0256}" for number in range(64)))
    assert refused.rejection.endswith("... has no rule in cluster.match_rules")
    assert len(refused.rejection) < 250


HOSTS = st.sampled_from(["a.x", "b.a.x", "*.a.x", "*.x", "x", "y"])
PATHS = st.sampled_from(["/", "/a", "/a/b", "/ab"])
MODELS = st.sampled_from(["m", "m-1", "m-*", "m*", "*", "n"])
HEADERS = st.dictionaries(st.sampled_from(["h", "i"]), st.sampled_from(["1", "2"]))


def some(values):
    return st.lists(values, max_size=2).map(tuple)


CLAIMS = st.builds(
    PoolMatch, hosts=some(HOSTS), paths=some(PATHS), models=some(MODELS), headers=HEADERS
)
REQUESTS = st.tuples(
    st.sampled_from(["a.x", "b.a.x", "c.b.a.x", "x", "y", "z"]),
    st.sampled_from(["/", "/a", "/a/b/c", "/ab", "/c"]),
    st.sampled_from(["m", "m-1", "m-2", "n", "o"]),
    HEADERS,
)


def takes(claim, request):
    host, path, model, headers = request
    if not linear_match.matches(claim, {":authority": host, ":path": path, **headers}):
        return False
    return not claim.models or linear_match.matches_model(claim, model)


@given(CLAIMS, CLAIMS, REQUESTS)
def test_no_request_escapes_a_limit(claim, limit, request):
    """A match within a limit takes no request that the limit excludes; overlaps are detected."""
    if takes(claim, request):
        assert takes(limit, request) or not pool_match.is_within(claim, limit)
        assert not takes(limit, request) or pool_match.overlaps(claim, limit)


def test_rules_are_described():
    """`extproc check` says what annotations may claim."""
    assert list(check.describe_pools(read("[]")))[-1] == (
        "match rules none: annotations of InferencePools are ignored (cluster.match_rules)"
    )
    rules = "[{pools: ['a/*', b/c], hosts: ['{namespace}.x'], headers: {t: v}}, {pools: [d/e]}]"
    assert list(check.describe_pools(read(rules)))[-2:] == [
        "match rules of a/*, b/c, by annotations: host {namespace}.x and header t=v",
        "match rules of d/e, by annotations: anything",
    ]


def test_a_match_rule_names_its_pools():
    """Trust is written out."""
    with pytest.raises(ConfigError):
        read("[{hosts: [a]}]")


def test_overlapping_matches_of_configured_pools_are_described():
    """The first one takes what both claim."""
    text = (
        "pools:\n- {name: a, endpoints: ['10.0.0.1:1'], match: {hosts: [x]}}\n"
        "- {name: b, endpoints: ['10.0.0.1:1'], match: {models: [m]}}\n"
        "- {name: c, endpoints: ['10.0.0.1:1'], match: {hosts: [y], models: [n]}}\n"
    )
    shown = list(check.describe_pools(config_text.read(text)))
    assert [line for line in shown if "comes first" in line] == [
        "            pool a comes first where both match a request"
    ]
