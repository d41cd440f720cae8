import json

import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.discovery.kubernetes import events, objects, resources
from tests.discovery.kubernetes import making

PODS = events.Reader(resources.PODS)
READERS = [events.Reader(one) for one in events.reading.FORMS]

KEYS = (
    *("metadata", "name", "namespace", "labels", "annotations", "spec", "status", "items"),
    *("selector", "matchLabels", "targetPorts", "number", "poolRef", "rules", "targets", "weight"),
    *("conditions", "type", "phase", "podIP", "addresses", "endpoints", "ports"),
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["True", "Ready", "Pod", "InferencePool", "10.0.0.1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)


def test_a_pod_is_read():
    """Everything pools depend on, and nothing else."""
    value = making.pod(
        "a",
        ip="fd00:0:0::1",
        node="n1",
        annotations={"llm-d.ai/active-ports": "8000", "model-pod-port": "8001", "x": "y"},
    )
    assert PODS.line(making.line("ADDED", value, "7")) == events.Set(
        objects.Pod(
            namespace="default",
            name="a",
            uid="uid-a",
            created="2026-01-01T00:00:00Z",
            ip="fd00::1",
            ready=True,
            labels={"app": "vllm"},
            node="n1",
            active_ports="8000",
            model_port="8001",
        ),
        "7",
    )


@pytest.mark.parametrize(
    "facts",
    [
        {"ready": False},
        {"deleted": True},
        {"phase": "Succeeded"},
        {"phase": "Failed"},
    ],
)
def test_a_pod_is_not_ready(facts):
    """Neither unready nor deleted nor ended ones are endpoints.

    Source: docs/reference/protocol-conformance.md#point-60.
    """
    found = PODS.line(making.line("MODIFIED", making.pod(**facts)))
    assert found.value.ready is False


def test_062_the_older_annotation_of_active_ports_counts_without_the_newer():
    """The new key beats the legacy one (docs/reference/protocol-conformance.md#point-62)."""
    old, new = "inference.networking.k8s.io/active-ports", "llm-d.ai/active-ports"
    read = [
        PODS.line(making.line("ADDED", making.pod(annotations=notes))).value.active_ports
        for notes in ({old: "1"}, {old: "1", new: "2"}, {old: "1", new: ""}, {})
    ]
    assert read == ["1", "2", "", None]


def test_the_other_kinds_of_lines():
    """Deletions, bookmarks and errors carry what is needed to go on."""
    gone = {"kind": "Status", "status": "Failure", "metadata": {}, "code": 410, "message": "old"}
    assert PODS.line(making.line("DELETED", making.pod("a"), "8")) == events.Gone(
        "default", "a", "8"
    )
    mark = {"kind": "Pod", "metadata": {}, "spec": {"containers": None}, "status": {}}
    assert PODS.line(making.line("BOOKMARK", mark, "9")) == events.Mark("9")
    assert PODS.line(making.line("ERROR", gone)) == events.Failure(410, "old")


def test_a_bookmark_of_a_resource_with_required_fields():
    """Bookmarks of pools have an empty spec, which no pool may have."""
    mark = {"kind": "InferencePool", "metadata": {}, "spec": {}}
    reader = events.Reader(resources.POOLS)
    assert reader.line(making.line("BOOKMARK", mark, "9")) == events.Mark("9")


def test_a_broken_object_is_known_by_name():
    """So that it can count as gone, and its version to go on from."""
    value = making.pod("a") | {"status": {"podIP": 5}}
    found = PODS.line(making.line("MODIFIED", value, "7"))
    assert (found.namespace, found.name, found.version) == ("default", "a", "7")
    assert "podIP" in found.reason


def test_a_broken_object_is_deleted_like_any_other():
    """Its deletion names it."""
    value = making.pod("a") | {"status": 5}
    assert PODS.line(making.line("DELETED", value, "7")) == events.Gone("default", "a", "7")


def test_one_broken_object_does_not_hide_the_others_of_a_list():
    """The page holds what can be read, and says what cannot."""
    broken = making.pod("b") | {"metadata": making.meta("b", labels=["x"])}
    page = PODS.page(making.page(making.pod("a"), broken, 5, making.pod("c"), more="t"))
    assert [value.name for value in page.values] == ["a", "c"]
    assert [one.name for one in page.broken] == ["b", ""]
    assert (page.version, page.more) == ("1", "t")


@pytest.mark.parametrize(
    "spec",
    [
        {"selector": {"matchLabels": {}}},
        {"selector": {}},
        {"targetPorts": []},
        {"targetPorts": [{"number": 0}]},
        {"targetPorts": [{"number": 65536}]},
        {"targetPorts": [{"number": "8000"}]},
    ],
)
def test_a_pool_the_schema_forbids_is_broken(spec):
    """A selector of nothing would take every pod of the namespace."""
    reader = events.Reader(resources.POOLS)
    assert isinstance(reader.line(making.line("ADDED", making.pool(**spec))), events.Broken)


def test_both_groups_of_pools_are_read():
    """The old one has a plain map and one port."""
    new = events.Reader(resources.POOLS).line(making.line("ADDED", making.pool())).value
    old = events.Reader(resources.OLD_POOLS).line(making.line("ADDED", making.old_pool())).value
    assert (new.selector, new.ports) == (old.selector, old.ports) == ({"app": "vllm"}, (8000,))
    assert (new.group, old.group) == (making.POOL_GROUP, making.OLD_GROUP)


def test_what_kubectl_leaves_behind_is_no_annotation():
    """It is the whole object once more."""
    value = making.pool()
    noise = "kubectl.kubernetes.io/last-applied-configuration"
    value["metadata"]["annotations"] = {"a": "b", noise: "{}"}
    found = events.Reader(resources.POOLS).line(making.line("ADDED", value)).value
    assert found.annotations == {"a": "b"}


def test_a_rule_that_matches_in_a_way_we_do_not_know_is_left_out():
    """It must not become one that matches everything."""
    value = making.rewrite(rules=[(["m"], {"n": None}), ([], {"o": 5})])
    value["spec"]["rules"][0]["matches"][0]["model"]["type"] = "RegularExpression"
    found = events.Reader(resources.REWRITES).line(making.line("ADDED", value)).value
    assert [(rule.models, rule.targets[0].model) for rule in found.rules] == [((), "o")]


@hypothesis.given(st.binary(max_size=200))
def test_no_bytes_raise(text):
    """Whatever stands in a line or a page, it is a value."""
    for reader in READERS:
        assert isinstance(reader.line(text), events.Event)
        assert isinstance(reader.page(text), events.Page | events.Unreadable)


@hypothesis.given(JSON, st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "X"]))
def test_no_document_raises(value, kind):
    """Nor does JSON that is nearly an object."""
    line = json.dumps({"type": kind, "object": value}).encode()
    page = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [value, value]}).encode()
    for reader in READERS:
        assert isinstance(reader.line(line), events.Event)
        found = reader.page(page)
        assert len(found.values) + len(found.broken) == 2


def test_deep_nesting_is_a_value():
    """The decoder gives up before the stack does."""
    line = b'{"type":"ADDED","object":{"metadata":' + b"[" * 100_000
    assert isinstance(PODS.line(line), events.Unreadable)


def test_an_object_that_makes_the_reader_raise_is_broken_alone():
    """In a list and in an event: the others are read, and its key and kind of error are told."""
    reader = events.Reader(resources.PODS)
    real = reader._value

    def raising(raw):
        if raw.metadata.name == "bad":
            raise OverflowError("what somebody wrote")
        return real(raw)

    reader._value = raising
    page = reader.page(making.page(making.pod("a"), making.pod("bad"), making.pod("b")))
    assert [value.name for value in page.values] == ["a", "b"]
    (broken,) = page.broken
    assert (broken.name, broken.reason) == ("bad", "reading it raised OverflowError")
    event = reader.line(making.line("MODIFIED", making.pod("bad"), "7"))
    assert isinstance(event, events.Broken)
    assert event.version == "7"
