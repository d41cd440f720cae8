import json

import hypothesis
from hypothesis import strategies as st

from extproc.discovery.kubernetes import api_responses, settings, store
from tests.discovery.kubernetes import builders, fake
from tests.support.reachable import count_reachable
from tests.support.seeded import examples

SERVICE = "kubernetes.io/service-name"

SOURCES = (
    settings.InferencePoolRef("one", "p"),
    settings.AllPools(),
    settings.AllPools(group=builders.OLD_GROUP),
    settings.PodSelector("two", "sel", {"app": "y"}, (9000,)),
    settings.ServiceRef("one", "engines", "http"),
)

namespaces = st.sampled_from(["one", "two"])
names = st.sampled_from(["p", "q"])
apps = st.sampled_from(["x", "y"])
ips = st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1", ""])
groups = st.sampled_from(["llm-d.ai", builders.OLD_GROUP])
refs = st.builds(builders.ref, names, st.sampled_from([builders.POOL_GROUP, builders.OLD_GROUP]))

objects = st.one_of(
    st.builds(
        builders.pod,
        st.sampled_from("abcd"),
        namespaces,
        ip=ips,
        app=apps,
        ready=st.booleans(),
        uid=st.sampled_from(["1", "2"]),
        created=st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]),
    ),
    st.builds(builders.pool, names, namespaces, app=apps, ports=st.sampled_from([(1,), (1, 2)])),
    st.builds(builders.old_pool, names, namespaces, app=apps),
    st.builds(
        builders.objective,
        names,
        namespaces,
        priority=st.integers(-1, 1),
        pool_ref=refs,
        group=groups,
    ),
    st.builds(
        builders.rewrite,
        names,
        namespaces,
        rules=st.sampled_from([[(["m"], {"n": 1})], [([], {"o": None})]]),
        pool_ref=refs,
        group=groups,
    ),
    st.builds(
        builders.slice_of,
        st.sampled_from(["engines", "others"]),
        namespaces,
        name=names,
        backends=st.lists(st.builds(builders.backend, ips, names, ready=st.booleans()), max_size=2),
    ),
)


def spoilt(value):
    """The same object, broken by a user."""
    value = json.loads(json.dumps(value))
    value["metadata"]["labels"] = 5
    return value


steps = st.one_of(
    st.tuples(st.just("put"), objects),
    st.tuples(st.just("put"), objects.map(spoilt)),
    st.tuples(st.just("delete"), objects),
    st.tuples(st.just("deliver"), st.integers(0, 20)),
    st.tuples(st.just("relist"), st.integers(0, 20)),
    st.tuples(st.just("collect"), st.none()),
)


class ConvergenceFixture:
    """A server's truth, and a cluster that hears of it late and in any order of kinds."""

    def __init__(self):
        self.truth = {}
        self.subject = store.ObjectStore(settings.KubernetesSettings(sources=SOURCES))
        self.queues = {collection: [] for collection in self.subject.collections}
        self.readers = {
            collection: api_responses.WatchReader(collection.resource)
            for collection in self.subject.collections
        }
        self.pools = {}

    def holders(self, value):
        path, about = fake.key_of(value), value["metadata"]
        for collection in self.subject.collections:
            group, plural = collection.resource.group, collection.resource.plural
            if path != (group, plural) or collection.namespace not in {"", about["namespace"]}:
                continue
            labels = about.get("labels")
            # A broken label leaves the object out of every selection by label.
            service = labels.get(SERVICE) if isinstance(labels, dict) else ""
            if collection.labels in {"", f"{SERVICE}={service}"}:
                yield collection

    def key(self, value):
        return (*fake.key_of(value), value["metadata"]["namespace"], value["metadata"]["name"])

    def put(self, value):
        self.delete(value)
        self.truth[self.key(value)] = value
        for collection in self.holders(value):
            self.queues[collection].append(builders.line("MODIFIED", value))

    def delete(self, value):
        old = self.truth.pop(self.key(value), None)
        for collection in self.holders(old) if old else ():
            self.queues[collection].append(builders.line("DELETED", old))

    def deliver(self, at):
        waiting = [collection for collection, queue in self.queues.items() if queue]
        if waiting:
            collection = waiting[at % len(waiting)]
            self.take(
                collection, self.readers[collection].decode_event(self.queues[collection].pop(0))
            )

    def take(self, collection, event):
        match event:
            case api_responses.Applied(value, _):
                self.subject.apply(collection, (value.namespace, value.name), value)
            case api_responses.Deleted(namespace, name, _) | api_responses.InvalidObject(
                namespace, name
            ):
                self.subject.apply(collection, (namespace, name), None)
            case _:
                raise AssertionError(event)

    def relist(self, at):
        collection = self.subject.collections[at % len(self.subject.collections)]
        self.queues[collection].clear()
        mine = [value for value in self.truth.values() if collection in self.holders(value)]
        self.subject.replace(
            collection, self.readers[collection].decode_list(builders.page(*mine)).values
        )

    def collect(self, _=None):
        changes = self.subject.collect()
        assert not changes.removed & set(changes.discovered)
        for key, pool in changes.discovered.items():
            assert self.pools.get(key) != pool
        self.pools = {
            key: pool for key, pool in self.pools.items() if key not in changes.removed
        } | dict(changes.discovered)

    def settle(self):
        """Lists what never was, and delivers the rest."""
        for at, collection in enumerate(self.subject.collections):
            if self.subject._statuses[collection] is store.CollectionStatus.UNKNOWN:
                self.relist(at)
        while any(self.queues.values()):
            self.deliver(0)
        self.collect()
        return self.pools


@hypothesis.settings(deadline=None, max_examples=examples(300))
@hypothesis.given(st.lists(steps, max_size=40))
@hypothesis.example(
    [("put", builders.pod(name, "two", app="y", uid="1", created="2026")) for name in "ab"]
)
def test_any_interleaving_converges_to_the_listed_state(script):
    """Lists, events and kinds in any order; a broken object hides no other."""
    play = ConvergenceFixture()
    for step, argument in script:
        getattr(play, step)(argument)
    late = play.settle()
    fresh = ConvergenceFixture()
    fresh.truth = play.truth
    assert late == fresh.settle()
    assert play.subject.synced
    assert not play.subject.has_changes
    for pool in late.values():
        addresses = [endpoint.address for endpoint in pool.endpoints]
        assert len(set(addresses)) == len(addresses)


def test_indices_do_not_leak():
    """When all objects are gone, nothing of them is kept."""
    play = ConvergenceFixture()
    counts = []
    for pool, pod, objective in ("pab", "qcd", "rst"):
        values = [
            builders.pool(pool, "two"),
            builders.pod(pod, "two"),
            builders.objective(objective, "two"),
        ]
        play.settle()
        for value in values:
            play.put(value)
        play.settle()
        for value in values:
            play.delete(value)
        play.settle()
        counts.append(count_reachable(play.subject))
    assert set(play.pools) == {"one/p", "two/sel", "one/engines"}
    assert counts[0] == counts[1] == counts[2]
