import json

import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.discovery.kubernetes import api_responses, objects, watch_plan
from tests.discovery.kubernetes import builders

PODS = api_responses.WatchReader(watch_plan.PODS)
READERS = [api_responses.WatchReader(form) for form in api_responses.objects.FORMS]

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
    value = builders.pod(
        "a",
        ip="fd00:0:0::1",
        node="n1",
        annotations={"llm-d.ai/active-ports": "8000", "model-pod-port": "8001", "x": "y"},
    )
    assert PODS.decode_event(builders.line("ADDED", value, "7")) == api_responses.Applied(
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
    event = PODS.decode_event(builders.line("MODIFIED", builders.pod(**facts)))
    assert event.value.ready is False


def test_062_the_older_annotation_of_active_ports_counts_without_the_newer():
    """The new key beats the legacy one (docs/reference/protocol-conformance.md#point-62)."""
    old, new = "inference.networking.k8s.io/active-ports", "llm-d.ai/active-ports"
    read = [
        PODS.decode_event(
            builders.line("ADDED", builders.pod(annotations=notes))
        ).value.active_ports
        for notes in ({old: "1"}, {old: "1", new: "2"}, {old: "1", new: ""}, {})
    ]
    assert read == ["1", "2", "", None]


def test_deletions_bookmarks_and_errors_are_read():
    """Deletions, bookmarks and errors carry what is needed to go on."""
    gone = {"kind": "Status", "status": "Failure", "metadata": {}, "code": 410, "message": "old"}
    assert PODS.decode_event(
        builders.line("DELETED", builders.pod("a"), "8")
    ) == api_responses.Deleted("default", "a", "8")
    mark = {"kind": "Pod", "metadata": {}, "spec": {"containers": None}, "status": {}}
    assert PODS.decode_event(builders.line("BOOKMARK", mark, "9")) == api_responses.Bookmark("9")
    assert PODS.decode_event(builders.line("ERROR", gone)) == api_responses.WatchError(410, "old")


@pytest.mark.parametrize(
    ("resource", "value"),
    [
        (watch_plan.POOLS, builders.pool("a")),
        (watch_plan.OLD_POOLS, builders.old_pool("a")),
        (watch_plan.OBJECTIVES, builders.objective("a")),
        (watch_plan.REWRITES, builders.rewrite("a", rules=[(["m"], {"n": 1})])),
    ],
)
def test_a_custom_object_in_deletion_counts_as_deleted(resource, value):
    """A finalizer may hold it for long; in lists it is absent."""
    reader = api_responses.WatchReader(resource)
    assert len(reader.decode_list(builders.page(value)).values) == 1
    value["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    deleted = api_responses.Deleted("default", "a", "8")
    for kind in ("ADDED", "MODIFIED"):
        assert reader.decode_event(builders.line(kind, value, "8")) == deleted
    page = reader.decode_list(builders.page(value))
    assert (page.values, page.invalid_objects) == ((), ())


def test_a_bookmark_of_a_resource_with_required_fields():
    """Bookmarks of pools have an empty spec, which no pool may have."""
    mark = {"kind": "InferencePool", "metadata": {}, "spec": {}}
    reader = api_responses.WatchReader(watch_plan.POOLS)
    assert reader.decode_event(builders.line("BOOKMARK", mark, "9")) == api_responses.Bookmark("9")


def test_an_invalid_object_has_a_name():
    """So that it can count as gone, and its version to go on from."""
    value = builders.pod("a") | {"status": {"podIP": 5}}
    event = PODS.decode_event(builders.line("MODIFIED", value, "7"))
    assert (event.namespace, event.name, event.version) == ("default", "a", "7")
    assert "podIP" in event.reason


def test_an_invalid_object_can_be_deleted():
    """Its deletion names it."""
    value = builders.pod("a") | {"status": 5}
    assert PODS.decode_event(builders.line("DELETED", value, "7")) == api_responses.Deleted(
        "default", "a", "7"
    )


def test_an_invalid_object_hides_no_other_of_a_list():
    """The page holds what can be read, and says what cannot."""
    broken = builders.pod("b") | {"metadata": builders.meta("b", labels=["x"])}
    page = PODS.decode_list(
        builders.page(builders.pod("a"), broken, 5, builders.pod("c"), more="t")
    )
    assert [value.name for value in page.values] == ["a", "c"]
    assert [broken.name for broken in page.invalid_objects] == ["b", ""]
    assert (page.version, page.continue_token) == ("1", "t")


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
    reader = api_responses.WatchReader(watch_plan.POOLS)
    assert isinstance(
        reader.decode_event(builders.line("ADDED", builders.pool(**spec))),
        api_responses.InvalidObject,
    )


def test_both_groups_of_pools_are_read():
    """The old one has a plain map and one port."""
    new = (
        api_responses.WatchReader(watch_plan.POOLS)
        .decode_event(builders.line("ADDED", builders.pool()))
        .value
    )
    old = (
        api_responses.WatchReader(watch_plan.OLD_POOLS)
        .decode_event(builders.line("ADDED", builders.old_pool()))
        .value
    )
    assert (new.selector, new.ports) == (old.selector, old.ports) == ({"app": "vllm"}, (8000,))
    assert (new.group, old.group) == (builders.POOL_GROUP, builders.OLD_GROUP)


def test_the_last_applied_annotation_is_dropped():
    """It is the whole object once more."""
    value = builders.pool()
    noise = "kubectl.kubernetes.io/last-applied-configuration"
    value["metadata"]["annotations"] = {"a": "b", noise: "{}"}
    pool = (
        api_responses.WatchReader(watch_plan.POOLS)
        .decode_event(builders.line("ADDED", value))
        .value
    )
    assert pool.annotations == {"a": "b"}


def test_a_rule_with_an_unknown_match_is_skipped():
    """It must not become one that matches everything."""
    value = builders.rewrite(rules=[(["m"], {"n": None}), ([], {"o": 5})])
    value["spec"]["rules"][0]["matches"][0]["model"]["type"] = "RegularExpression"
    rewrite = (
        api_responses.WatchReader(watch_plan.REWRITES)
        .decode_event(builders.line("ADDED", value))
        .value
    )
    assert [(rule.models, rule.targets[0].model) for rule in rewrite.rules] == [((), "o")]


def test_a_rule_without_targets_is_skipped():
    """The API allows it; the other rules of its object count."""
    value = builders.rewrite(
        rules=[(["a"], {}), (["b"], {"": None}), (["c"], {}), (["m"], {"": 9, "n": 1})]
    )
    del value["spec"]["rules"][0]["targets"]
    rewrite = (
        api_responses.WatchReader(watch_plan.REWRITES)
        .decode_event(builders.line("ADDED", value))
        .value
    )
    assert [rule.models for rule in rewrite.rules] == [("m",)]
    assert [target.model for target in rewrite.rules[0].targets] == ["n"]


@hypothesis.given(st.binary(max_size=200))
def test_no_bytes_raise(text):
    """Whatever stands in a line or a page, it is a value."""
    for reader in READERS:
        assert isinstance(reader.decode_event(text), api_responses.WatchEvent)
        assert isinstance(
            reader.decode_list(text), api_responses.ListPage | api_responses.UndecodableMessage
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b"<html>\r\n<h1>502 Bad\tGateway</h1>\n</html>\n",
            "<html> <h1>502 Bad Gateway</h1> </html>",
        ),
        (b'{"message": "denied:\\n no rule\\n", "code": 403}', "denied: no rule"),
        (b"x\n" * 500, "x " * 99 + "x"),
        (b"", ""),
    ],
)
def test_the_message_of_an_error_is_one_line(text, message):
    """The page of a proxy before the server has several; logs and /readyz show one."""
    assert api_responses.decode_status(text).message == message


@hypothesis.given(JSON, st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "X"]))
def test_no_document_raises(value, kind):
    """Nor does JSON that is nearly an object."""
    line = json.dumps({"type": kind, "object": value}).encode()
    page = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [value, value]}).encode()
    for reader in READERS:
        assert isinstance(reader.decode_event(line), api_responses.WatchEvent)
        decoded = reader.decode_list(page)
        assert len(decoded.values) + len(decoded.invalid_objects) == 2


def test_deep_nesting_is_a_value():
    """The decoder gives up before the stack does."""
    line = b'{"type":"ADDED","object":{"metadata":' + b"[" * 100_000
    assert isinstance(PODS.decode_event(line), api_responses.UndecodableMessage)


def test_an_object_that_raises_is_the_only_invalid_one():
    """An unreadable object of a list or event is reported by key and error; others are read."""
    reader = api_responses.WatchReader(watch_plan.PODS)
    real = reader._value

    def raising(raw):
        if raw.metadata.name == "bad":
            raise OverflowError("what somebody wrote")
        return real(raw)

    reader._value = raising
    page = reader.decode_list(
        builders.page(builders.pod("a"), builders.pod("bad"), builders.pod("b"))
    )
    assert [value.name for value in page.values] == ["a", "b"]
    (broken,) = page.invalid_objects
    assert (broken.name, broken.reason) == ("bad", "reading it raised OverflowError")
    event = reader.decode_event(builders.line("MODIFIED", builders.pod("bad"), "7"))
    assert isinstance(event, api_responses.InvalidObject)
    assert event.version == "7"
