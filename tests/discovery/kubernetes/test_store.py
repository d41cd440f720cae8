import pytest

from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.discovery.kubernetes import api_responses, settings, store, watch_plan
from extproc.endpoint import LabelExpression
from extproc.errors import ConfigError
from tests.discovery.kubernetes import builders, fake

REF = settings.InferencePoolRef("default", "pool")
SEL = settings.PodSelector("default", "sel", {"app": "vllm"}, (8000,))


class StoreWorld:
    """A cluster that receives objects as the server writes them."""

    def __init__(self, *sources, listed=True, **wanted):
        self.subject = store.ObjectStore(
            settings.KubernetesSettings(sources=sources or (REF,), **wanted)
        )
        self.pools = {}
        if listed:
            self.list()

    def collections(self, value):
        group, plural = fake.key_of(value)
        return [
            collection
            for collection in self.subject.collections
            if (collection.resource.group, collection.resource.plural) == (group, plural)
        ]

    def list(self, *values):
        """Lists all collections, in which these are all objects there are."""
        for collection in self.subject.collections:
            mine = [value for value in values if collection in self.collections(value)]
            page = api_responses.WatchReader(collection.resource).decode_list(builders.page(*mine))
            assert page.invalid_objects == ()
            self.subject.replace(collection, page.values)
        return self.collect()

    def put(self, *values):
        for value in values:
            for collection in self.collections(value):
                event = (
                    api_responses.WatchReader(collection.resource)
                    .decode_event(builders.line("MODIFIED", value))
                    .value
                )
                self.subject.apply(collection, (event.namespace, event.name), event)
        return self.collect()

    def delete(self, *values):
        for value in values:
            for collection in self.collections(value):
                about = value["metadata"]
                self.subject.apply(collection, (about["namespace"], about["name"]), None)
        return self.collect()

    def collect(self):
        changes = self.subject.collect()
        self.pools.update(changes.discovered)
        for key in changes.removed:
            del self.pools[key]
        return set(changes.discovered) | changes.removed

    def addresses(self, key="default/pool"):
        return [endpoint.address for endpoint in self.pools[key].endpoints]


def test_a_configured_pool_that_is_missing_is_reported():
    """It does not exist, which is another thing than having no endpoints."""
    world = StoreWorld()
    assert world.pools == {"default/pool": DiscoveredPool(exists=False)}
    world.put(builders.pool())
    assert world.pools == {"default/pool": DiscoveredPool()}


def test_nothing_is_reported_before_all_collections_are_listed():
    """A pool without its pods, or without its priorities, would be wrong."""
    world = StoreWorld(listed=False)
    for collection in world.subject.collections:
        assert world.collect() == set()
        assert not world.subject.synced
        world.subject.replace(collection, ())
    assert world.subject.synced
    assert world.collect() == {"default/pool"}


@pytest.mark.parametrize(
    ("presence", "optional", "synced"),
    [
        (store.CollectionStatus.ABSENT, True, True),
        (store.CollectionStatus.FORBIDDEN, True, True),
        (store.CollectionStatus.FAILED, True, True),
        (store.CollectionStatus.ABSENT, False, True),
        (store.CollectionStatus.FORBIDDEN, False, False),
    ],
)
def test_forbidden_policies_count_as_listed_and_pods_do_not(presence, optional, synced):
    """Without the right to list pods there is no pool; priorities may stay unknown."""
    world = StoreWorld(listed=False)
    for collection in world.subject.collections:
        if collection.resource.optional is optional:
            world.subject.set_status(collection, presence)
        else:
            world.subject.replace(collection, ())
    assert world.subject.synced is synced


def test_only_changed_pools_are_reported():
    """A pod of one pool is nothing to the other; nor is a change nothing depends on."""
    other = settings.InferencePoolRef("default", "other")
    world = StoreWorld(REF, other)
    world.put(builders.pool(), builders.pool("other", app="x"))
    assert world.put(builders.pod("a")) == {"default/pool"}
    assert world.put(builders.pod("b", app="x", ip="10.0.0.2")) == {"default/other"}
    assert world.put(builders.pod("a", created="2027-01-01T00:00:00Z")) == set()
    assert world.put(builders.pod("c", app="third")) == set()
    assert world.put(builders.pod("a", app="x")) == {"default/pool", "default/other"}
    assert world.addresses("default/other") == ["10.0.0.1:8000", "10.0.0.2:8000"]


def expression(key, operator, *values):
    return LabelExpression(key, operator, values)


@pytest.mark.parametrize(
    ("labels", "expressions", "members", "watched"),
    [
        ({}, [expression("tier", "In", "gpu", "tpu")], "ab", "tier in (gpu,tpu)"),
        ({}, [expression("tier", "NotIn", "gpu")], "bc", "tier notin (gpu)"),
        ({"app": "vllm"}, [expression("tier", "Exists")], "ab", "app=vllm,tier"),
        ({"app": "vllm"}, [expression("tier", "DoesNotExist")], "c", "app=vllm,!tier"),
    ],
)
def test_expressions_select_pods_as_the_server_does(labels, expressions, members, watched):
    """With and without labels, in the store and in the query; a pod may come and go by its labels."""
    source = settings.PodSelector("default", "sel", labels, (8000,), tuple(expressions))
    world = StoreWorld(source)
    (pods,) = world.subject.collections
    assert pods.labels == watched
    tiers = {"a": {"tier": "gpu"}, "b": {"tier": "tpu"}, "c": {}}
    for at, (name, tier) in enumerate(tiers.items()):
        world.put(builders.pod(name, ip=f"10.0.0.{at}", labels=tier))
    assert "".join(endpoint.name for endpoint in world.pools["default/sel"].endpoints) == members
    others = next(tier for name, tier in tiers.items() if name not in members)
    for name in members:
        world.put(builders.pod(name, labels=others))
    assert world.addresses("default/sel") == []


def test_a_pod_of_another_namespace_is_not_a_member():
    """Selectors look at their own namespace (docs/reference/protocol-conformance.md#point-60)."""
    world = StoreWorld(settings.AllPools())
    world.put(builders.pool(), builders.pod("a", "elsewhere"))
    assert world.addresses() == []


def test_nothing_stays_of_a_deleted_namespace():
    """Namespaces of previews come and go for as long as the process runs."""
    world = StoreWorld(settings.AllPools())
    sizes = []
    for number in range(3):
        there = f"preview-{number}"
        things = (
            builders.pool(namespace=there),
            builders.pod("a", there),
            builders.objective(namespace=there, pool_ref=builders.ref()),
        )
        world.put(*things)
        assert world.addresses(f"{there}/pool") == ["10.0.0.1:8000"]
        world.delete(*things)
        tables = vars(world.subject).items()
        sizes.append({name: len(table) for name, table in tables if isinstance(table, dict)})
    assert sizes[0] == sizes[1] == sizes[2]


def test_all_labels_must_match():
    """A pool that asks for two takes no pod with one."""
    world = StoreWorld()
    selector = {"matchLabels": {"app": "vllm", "tier": "gold"}}
    world.put(builders.pool(selector=selector), builders.pod("a"))
    assert world.addresses() == []
    world.put(builders.pod("a", labels={"tier": "gold"}))
    assert world.addresses() == ["10.0.0.1:8000"]


def test_a_list_replaces_earlier_objects():
    """Objects that the list lacks are deleted."""
    world = StoreWorld()
    world.list(builders.pool(), builders.pod("a"), builders.pod("b", ip="10.0.0.2"))
    assert world.addresses() == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert world.list(builders.pool(), builders.pod("b", ip="10.0.0.2")) == {"default/pool"}
    assert world.addresses() == ["10.0.0.2:8000"]


def test_a_pod_with_a_reused_address_is_another_endpoint():
    """Name and address may be the same; the uid is not."""
    world = StoreWorld()
    world.list(builders.pool(), builders.pod("a", uid="one"))
    assert world.put(builders.pod("a", uid="two")) == {"default/pool"}
    assert [endpoint.uid for endpoint in world.pools["default/pool"].endpoints] == ["two"]


def test_a_deleted_pool_is_removed_and_may_return():
    """A shared picker forgets it."""
    world = StoreWorld(settings.AllPools())
    world.put(builders.pool(), builders.pod("a"))
    assert world.delete(builders.pool()) == {"default/pool"}
    assert world.pools == {}
    world.delete(builders.pool())
    world.put(builders.pool(ports=(1,)))
    assert world.addresses() == ["10.0.0.1:1"]


def test_a_recreated_pool_is_not_removed():
    """Between two reports only the last state counts."""
    world = StoreWorld(settings.AllPools())
    world.put(builders.pool(), builders.pod("a"))
    for collection in world.collections(builders.pool()):
        world.subject.apply(collection, ("default", "pool"), None)
    assert world.put(builders.pool()) == set()
    assert world.addresses() == ["10.0.0.1:8000"]


def test_the_new_group_of_a_pool_wins():
    """While both are there, as in a migration."""
    old = settings.AllPools(group=builders.OLD_GROUP)
    world = StoreWorld(settings.AllPools(), old)
    world.put(builders.old_pool(port=1), builders.pod("a"))
    assert world.addresses() == ["10.0.0.1:1"]
    world.put(builders.pool())
    assert world.addresses() == ["10.0.0.1:8000"]
    world.delete(builders.pool())
    assert world.addresses() == ["10.0.0.1:1"]


def test_a_pool_of_another_group_is_ignored():
    """The group is part of the question."""
    world = StoreWorld(settings.InferencePoolRef("default", "pool", builders.OLD_GROUP))
    world.put(builders.pod("a"))
    assert not world.pools["default/pool"].exists
    world.put(builders.old_pool())
    assert world.addresses() == ["10.0.0.1:8000"]


def test_pods_by_label_and_a_pool_side_by_side():
    """One list of pods serves both."""
    world = StoreWorld(REF, SEL)
    world.put(builders.pool(ports=(1,)), builders.pod("a"))
    assert world.addresses("default/sel") == ["10.0.0.1:8000"]
    assert world.addresses() == ["10.0.0.1:1"]


def test_protocol_and_annotations_of_a_pool_are_passed_on():
    """Its protocol and annotations."""
    value = builders.pool(appProtocol="kubernetes.io/h2c")
    value["metadata"]["annotations"] = {"a": "b"}
    world = StoreWorld()
    world.put(value)
    pool = world.pools["default/pool"]
    assert (pool.app_protocol, pool.annotations) == ("kubernetes.io/h2c", {"a": "b"})


def test_only_objectives_of_the_pool_count():
    """By name and group, and of its namespace (docs/reference/protocol-conformance.md#point-82)."""
    world = StoreWorld()
    world.put(
        builders.pool(),
        builders.objective("mine", priority=-5),
        builders.objective("unset", priority=None),
        builders.objective("other", pool_ref=builders.ref("other")),
        builders.objective("group", pool_ref=builders.ref(group="x")),
        builders.objective("kind", pool_ref=builders.ref(kind="Service")),
        builders.objective("namespace", "elsewhere"),
    )
    assert world.pools["default/pool"].policy.priorities == {"mine": -5, "unset": 0}
    assert world.delete(builders.objective("mine")) == {"default/pool"}
    assert world.put(builders.objective("unset", pool_ref=builders.ref("other"))) == {
        "default/pool"
    }
    assert world.pools["default/pool"].policy.priorities == {}


def test_the_group_of_a_reference_may_be_left_out():
    """It is that of InferencePool v1 then."""
    world = StoreWorld()
    world.put(builders.pool(), builders.objective(priority=3, pool_ref={"name": "pool"}))
    assert world.pools["default/pool"].policy.priorities == {"high": 3}


def test_older_rewrites_come_first():
    """Then by name, and in the order of the list.

    Source: docs/reference/protocol-conformance.md#point-83.
    """
    world = StoreWorld()
    new = builders.rewrite("a", rules=[(["3"], {"x": 1})], created="2026-01-03T00:00:00Z")
    old = builders.rewrite("b", rules=[(["1"], {"x": 1}), (["2"], {"x": 1})])
    twin = builders.rewrite("c", rules=[([], {"x": 70, "y": 30})])
    world.put(builders.pool(), new, twin, old)
    rules = world.pools["default/pool"].policy.rules
    assert [rule.models for rule in rules] == [("1",), ("2",), (), ("3",)]
    assert [(target.model, target.weight) for target in rules[2].targets] == [("x", 70), ("y", 30)]


def test_where_both_groups_are_installed_only_the_new_one_is_read():
    """Even if it has no objects (docs/reference/protocol-conformance.md#point-88)."""
    world = StoreWorld(listed=False)
    for collection in world.subject.collections:
        if collection.resource == watch_plan.OBJECTIVES:
            world.subject.set_status(collection, store.CollectionStatus.ABSENT)
        else:
            world.subject.replace(collection, ())
    world.put(builders.pool(), builders.objective(priority=7, group=builders.OLD_GROUP))
    assert world.pools["default/pool"].policy.priorities == {"high": 7}
    (new,) = [
        collection
        for collection in world.subject.collections
        if collection.resource == watch_plan.OBJECTIVES
    ]
    world.subject.replace(new, ())
    assert world.collect() == {"default/pool"}
    assert world.pools["default/pool"].policy.priorities == {}
    world.subject.set_status(new, store.CollectionStatus.FORBIDDEN)
    assert world.collect() == set()
    assert world.pools["default/pool"].policy.priorities == {}
    world.subject.set_status(new, store.CollectionStatus.ABSENT)
    assert world.collect() == {"default/pool"}
    assert world.pools["default/pool"].policy.priorities == {"high": 7}


def test_policies_are_watched_only_where_enabled():
    """They take rights of their own."""
    world = StoreWorld(policies=False)
    assert {collection.resource.plural for collection in world.subject.collections} == {
        "inferencepools",
        "pods",
    }


@pytest.mark.parametrize(
    ("sources", "paths"),
    [
        (
            [REF],
            {
                (
                    "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
                    "?metadata.name=pool"
                ),
                "/api/v1/namespaces/default/pods?",
            },
        ),
        (
            [REF, settings.InferencePoolRef("default", "other"), SEL],
            {
                "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools?",
                "/api/v1/namespaces/default/pods?",
            },
        ),
        (
            [settings.AllPools(group=builders.OLD_GROUP), REF],
            {
                "/apis/inference.networking.x-k8s.io/v1alpha2/inferencepools?",
                (
                    "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
                    "?metadata.name=pool"
                ),
                "/api/v1/pods?",
            },
        ),
        ([SEL], {"/api/v1/namespaces/default/pods?app=vllm"}),
        (
            [settings.ServiceRef("a/../b", "s")],
            {
                (
                    "/apis/discovery.k8s.io/v1/namespaces/a%2F..%2Fb/endpointslices"
                    "?kubernetes.io/service-name=s"
                )
            },
        ),
    ],
)
def test_no_more_is_watched_than_needed(sources, paths):
    """As narrow as the sources allow, and no object twice."""
    plan = watch_plan.plan_watches(sources, policies=False)
    assert {
        f"{collection.path}?{collection.labels}{collection.fields}" for collection in plan
    } == paths
    assert len(plan) == len(paths)


@pytest.mark.parametrize(
    "sources",
    [
        [REF, REF],
        [REF, settings.ServiceRef("default", "pool")],
        [settings.InferencePoolRef("default", "pool", "group")],
        [settings.AllPools(group="group")],
        [settings.PodSelector("default", "sel", {}, (8000,))],
        [settings.PodSelector("default", "sel", {"a": "b"}, (0,))],
        [settings.PodSelector("default", "sel", {"a": "b"}, (1, 1))],
        [settings.PodSelector("default", "sel", {"a": "b"}, tuple(range(1, 10)))],
    ],
)
def test_contradictory_sources_are_refused(sources):
    """Before anything is asked of a server."""
    with pytest.raises(ConfigError, match=r"kubernetes\.sources\[[01]\]"):
        store.ObjectStore(settings.KubernetesSettings(sources=sources))
