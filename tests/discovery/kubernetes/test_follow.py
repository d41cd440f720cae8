import asyncio
import contextlib
import random
import time

import pytest

from extproc import supervision
from extproc.discovery.kubernetes import cluster, feed, follow, settings, views
from extproc.errors import ConfigError
from tests.discovery.kubernetes import fake, making

REF = settings.InferencePoolRef("default", "pool")
KEY = REF.key


class Scene:
    """A follower of a fake API server, and what it has told."""

    def __init__(self, server, folder, *sources, **wanted):
        self.server = server
        self.pools = {}
        self.told = []
        self.facts = []
        self.moved = asyncio.Condition()
        self.folder = folder
        patience = {"retry_s": 0.01, "retry_most_s": 0.05, "absent_s": 0.05, "coalesce_s": 0.001}
        self.subject = follow.Follower(
            settings.Settings(
                sources=sources or (REF,),
                kubeconfig=server.kubeconfig(folder),
                **(patience | wanted),
            ),
            clock=time.monotonic,
            rng=random.Random(1),
            on_pools=self._on_pools,
            on_fact=self._on_fact,
        )

    def _on_pools(self, found, removed):
        self.told.append((dict(found), removed))
        self.pools = {key: one for key, one in self.pools.items() if key not in removed} | found
        self._news()

    def _on_fact(self, fact):
        self.facts.append(fact)
        self._news()

    def _news(self):
        task = asyncio.ensure_future(self._notify())
        task.add_done_callback(lambda _: None)

    async def _notify(self):
        async with self.moved:
            self.moved.notify_all()

    async def until(self, true, timeout_s=60.0):
        try:
            async with asyncio.timeout(timeout_s), self.moved:
                await self.moved.wait_for(true)
        except TimeoutError:
            pytest.fail(f"never so: {self.pools} {self.facts} {self.server.requests[-5:]}")

    async def until_names(self, *names, key=KEY):
        await self.until(lambda: self.names(key) == list(names))

    async def until_fact(self, kind):
        await self.until(lambda: kind in self.kinds())
        return next(fact for fact in self.facts if fact.kind == kind)

    def names(self, key=KEY):
        return [one.name for one in self.pools[key].endpoints] if key in self.pools else None

    def kinds(self):
        return [fact.kind for fact in self.facts]


@contextlib.asynccontextmanager
async def following(folder, *objects, sources=(), prepare=lambda server: None, **wanted):
    """A started and running follower of a server with these objects."""
    server = await fake.ApiServer().start()
    server.put(*objects)
    prepare(server)
    scene = Scene(server, folder, *sources, **wanted)
    try:
        await scene.subject.start()
        running = asyncio.ensure_future(scene.subject.run())
        try:
            yield scene
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    finally:
        await scene.subject.close()
        await server.close()


def test_a_pool_is_told_of_when_start_returns(tmp_path):
    """Endpoints, priorities and rewrites are there before the first request is served."""

    async def scene():
        rules = [(["m"], {"n": None})]
        objects = (making.pool(), making.pod("b"), making.objective(), making.rewrite(rules=rules))
        async with following(tmp_path, *objects) as one:
            assert one.names() == ["b"]
            assert one.subject.synced
            assert one.pools[KEY].policy.priorities == {"high": 1}
            assert [rule.models for rule in one.pools[KEY].policy.rules] == [("m",)]
            assert one.kinds() == ["synced"]

    asyncio.run(scene())


def test_changes_are_told_of(tmp_path):
    """Pods come, turn unready and go; the pool changes its ports and its selector."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b")
            one.server.put(making.pod("a", ready=False))
            await one.until_names("b")
            one.server.delete(making.pod("b"))
            await one.until_names()
            one.server.put(making.pod("a"), making.pod("c", app="other", ip="10.0.0.3"))
            one.server.put(making.pool(ports=(8000, 8001)))
            await one.until_names("a-rank-0", "a-rank-1")
            one.server.put(making.pool(app="other"))
            await one.until_names("c")

    asyncio.run(scene())


def test_a_pool_that_is_deleted_is_told_of_and_may_come_back(tmp_path):
    """Its requests are refused until then."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            one.server.delete(making.pool())
            await one.until(lambda: not one.pools[KEY].exists)
            one.server.put(making.pool())
            await one.until_names("a")

    asyncio.run(scene())


def test_a_watch_that_breaks_goes_on_where_it_was(tmp_path):
    """Whether the connection ends or breaks within a line, nothing is lost and nothing listed."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            lists = sum("watch" not in query for _, query in one.server.requests)
            for at, last in enumerate((b"", b'{"type":"MODIFIED","object":{"meta')):
                one.server.drop(last=last)
                one.server.put(making.pod(f"b{at}", ip=f"10.0.1.{at}"))
                await one.until(lambda name=f"b{at}": name in one.names())
            assert sum("watch" not in query for _, query in one.server.requests) == lists
            assert one.names() == ["a", "b0", "b1"]

    asyncio.run(scene())


def test_a_version_the_server_has_forgotten_is_listed_again(tmp_path):
    """410 as an answer and 410 as an event both end in a fresh list."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            one.server.put(making.pod("b", ip="10.0.0.2"))
            one.server.delete(making.pod("a"))
            one.server.compact()
            one.server.drop()
            await one.until_names("b")
            one.server.put(making.pod("c", ip="10.0.0.3"))
            await one.until_names("b", "c")
            one.facts.clear()
            gone = {"kind": "Status", "status": "Failure", "code": 410, "message": "too old"}
            one.server.send(making.line("ERROR", gone) + b"\n")
            await one.until_fact("relisted")
            one.server.put(making.pod("d", ip="10.0.0.4"))
            await one.until_names("b", "c", "d")

    asyncio.run(scene())


def test_a_bookmark_moves_the_version(tmp_path):
    """After a quiet time the watch goes on from the bookmark, which is not forgotten yet."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            one.server.compact()
            mark = {"kind": "Pod", "metadata": {}}
            one.server.send(making.line("BOOKMARK", mark, str(one.server.version)) + b"\n")
            one.server.requests.clear()
            one.server.drop()
            await one.server.until_watched()
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b")
            assert "relisted" not in one.kinds()

    asyncio.run(scene())


def test_a_line_that_is_no_event_is_listed_again(tmp_path):
    """What was missed cannot be known, so everything is asked for."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            one.server.send(b"<html>gateway</html>\n")
            await one.until_fact("unreadable")
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b")

    asyncio.run(scene())


def test_while_the_server_is_away_the_pools_stand(tmp_path):
    """One word when it goes, one when it is back; then the changes in between, none twice."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            await one.server.stop()
            await one.until_fact("disconnected")
            assert one.names() == ["a"]
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.server.start()
            await one.until_names("a", "b")
            await one.until_fact("connected")
            assert one.kinds() == ["synced", "disconnected", "connected"]
            assert [len(found) for found, _ in one.told] == [1, 1]

    asyncio.run(scene())


def test_a_rotated_token_is_read_again(tmp_path):
    """401 loads the credentials again, and the watch goes on."""

    async def scene():
        def prepare(server):
            server.token = "first"

        async with following(tmp_path, making.pool(), making.pod("a"), prepare=prepare) as one:
            await one.server.until_watched()
            one.server.token = "second"
            one.server.drop()
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_fact("unauthorized")
            one.server.kubeconfig(tmp_path)
            await one.until_names("a", "b")
            await one.until_fact("connected")

    asyncio.run(scene())


def test_missing_rights_are_named(tmp_path):
    """The fact says what to add to which role; rights given later are noticed."""

    async def scene():
        def prepare(server):
            server.forbidden.add(("", "pods"))

        objects = (making.pool(), making.pod("a"))
        async with following(tmp_path, *objects, prepare=prepare, start_s=0.2) as one:
            fact = await one.until_fact("forbidden")
            assert 'resources: ["pods"], verbs: ["list", "watch"]' in fact.detail
            assert "in namespace default" in fact.detail
            assert "add to a Role" in fact.detail
            assert not one.subject.synced
            assert one.told == []
            one.server.forbidden.clear()
            await one.until_names("a")
            assert one.subject.synced

    asyncio.run(scene())


def test_missing_rights_to_objectives_leave_priority_0(tmp_path):
    """A pool does not wait for what only makes it better."""

    async def scene():
        def prepare(server):
            server.forbidden.add(("llm-d.ai", "inferenceobjectives"))

        objects = (making.pool(), making.pod("a"), making.objective())
        async with following(tmp_path, *objects, prepare=prepare) as one:
            assert one.names() == ["a"]
            assert one.pools[KEY].policy.priorities == {}
            assert one.kinds() == ["forbidden", "synced"]

    asyncio.run(scene())


def test_crds_may_be_absent_and_come_later(tmp_path):
    """Without the CRDs priorities are 0 and nobody is told; installed later they count."""

    async def scene():
        group = ("llm-d.ai", "inferenceobjectives")

        def prepare(server):
            server.absent.add(group)

        old = making.objective("old", group=making.OLD_GROUP, priority=7)
        new = making.objective("new", priority=5)
        objects = (making.pool(), making.pod("a"), old, new)
        async with following(tmp_path, *objects, prepare=prepare) as one:
            assert one.kinds() == ["synced"]
            assert one.pools[KEY].policy.priorities == {"old": 7}
            one.server.absent.clear()
            await one.until(lambda: one.pools[KEY].policy.priorities == {"new": 5})

    asyncio.run(scene())


def test_without_the_crd_of_pools_there_is_no_pool_until_there_is(tmp_path):
    """The pool asked for does not exist, says a fact; it is found when the CRD is there."""

    async def scene():
        group = (making.POOL_GROUP, "inferencepools")

        def prepare(server):
            server.absent.add(group)

        async with following(tmp_path, making.pod("a"), prepare=prepare) as one:
            assert not one.pools[KEY].exists
            assert "not-installed" in one.kinds()
            one.server.absent.clear()
            one.server.put(making.pool())
            await one.until_names("a")

    asyncio.run(scene())


def test_a_crd_that_seems_gone_for_a_moment_is_not(tmp_path):
    """A server that has just started may answer 404 for CRDs; pools stand."""

    async def scene():
        group = (making.POOL_GROUP, "inferencepools")
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            one.server.absent.add(group)
            one.server.requests.clear()
            one.server.drop()
            await one.server.until(lambda seen: sum("inferencepools" in at for at, _ in seen) > 3)
            assert one.names() == ["a"]
            one.server.absent.clear()
            one.server.put(making.pool(ports=(9000,)))
            await one.until(lambda: one.pools[KEY].endpoints[0].address == "10.0.0.1:9000")

    asyncio.run(scene())


def test_a_refusal_by_a_server_that_has_just_started_is_no_missing_right(tmp_path):
    """403 where a list was had before is tried again like a 503, and the version is kept."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            await one.server.stop()
            one.server.forbidden.update({("", "pods"), (making.POOL_GROUP, "inferencepools")})
            one.server.requests.clear()
            await one.server.start()
            await one.server.until(lambda seen: sum("/pods" in at for at, _ in seen) > 3)
            assert one.names() == ["a"]
            one.server.put(making.pod("b", ip="10.0.0.2"))
            one.server.forbidden.clear()
            await one.until_names("a", "b")
            await one.until_fact("connected")
            assert one.kinds() == ["synced", "disconnected", "connected"]
            assert all("watch" in query for at, query in one.server.requests if "/pods" in at)

    asyncio.run(scene())


def test_rights_that_are_lost_are_the_last_word(tmp_path, monkeypatch):
    """No word of being connected while pods are forbidden; one once they are not."""
    monkeypatch.setattr(feed, "_SURELY_FORBIDDEN_S", 0.05)

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.server.until_watched()
            await one.server.stop()
            await one.until_fact("disconnected")
            one.server.forbidden.add(("", "pods"))
            await one.server.start()
            await one.until_fact("forbidden")
            await one.server.until_watched(5)
            assert "connected" not in one.kinds()
            assert one.facts[-1].kind == "forbidden"
            assert "pods in namespace default" in one.facts[-1].detail
            (pods,) = [status for status in one.subject.statuses if status.stands]
            assert (pods.collection.title, pods.state) == ("pods in namespace default", "forbidden")
            assert one.names() == ["a"]
            one.server.forbidden.clear()
            await one.until_fact("connected")
            assert not any(status.stands for status in one.subject.statuses)

    asyncio.run(scene())


def test_a_token_that_expires_in_an_outage_is_named(tmp_path):
    """The reason changes, and the log with it."""

    async def scene():
        def prepare(server):
            server.token = "first"

        async with following(tmp_path, making.pool(), making.pod("a"), prepare=prepare) as one:
            await one.server.until_watched()
            await one.server.stop()
            await one.until_fact("disconnected")
            one.server.token = "second"
            await one.server.start()
            assert "401 Unauthorized" in (await one.until_fact("unauthorized")).detail
            one.server.kubeconfig(tmp_path)
            await one.until_fact("connected")

    asyncio.run(scene())


def test_long_lists_come_in_pages(tmp_path):
    """A list of many pages is complete, and one whose token expires begins again."""

    async def scene():
        pods = [making.pod(f"p{at:02}", ip=f"10.0.0.{at}") for at in range(25)]

        def prepare(server):
            seen = []

            async def expire(request):
                seen.append(request.query.get("continue"))
                return fake.refuse(410, "The provided continue parameter is too old")

            async def pages(request):
                if request.path.endswith("pods") and request.query.get("continue"):
                    server.answers.clear()
                    return await expire(request)
                server.answers.append(pages)
                return server._list(
                    request, fake.Matching(*fake.where(request.path), request.query)
                )

            server.answers.append(pages)

        sources = (settings.Selector("default", {"app": "vllm"}, (8000,), "sel"),)
        async with following(tmp_path, *pods, sources=sources, prepare=prepare, page=10) as one:
            assert one.names("default/sel") == [f"p{at:02}" for at in range(25)]
            assert "relisted" in one.kinds()
            assert {query.get("limit") for _, query in one.server.requests[:3]} == {"10"}

    asyncio.run(scene())


def test_a_server_that_is_busy_is_left_alone(tmp_path):
    """429 and 500 are tried again; the start waits for it."""

    async def scene():
        def prepare(server):
            async def busy(_):
                return fake.refuse(429, "too many requests", **{"Retry-After": "0"})

            async def broken(_):
                return fake.refuse(500, "etcd leader changed")

            server.answers.extend([busy, broken, busy])

        async with following(tmp_path, making.pool(), making.pod("a"), prepare=prepare) as one:
            assert one.names() == ["a"]

    asyncio.run(scene())


def test_a_start_without_a_server_goes_on_unready(tmp_path):
    """After a while start gives up waiting and says for what; run goes on trying."""

    async def scene():
        server = await fake.ApiServer().start()
        server.put(making.pool(), making.pod("a"))
        one = Scene(server, tmp_path, start_s=0.1)
        await server.stop()
        await one.subject.start()
        assert not one.subject.synced
        fact = await one.until_fact("unsynced")
        assert f"127.0.0.1:{server.port}" in fact.detail
        assert "pods in namespace default" in fact.detail
        assert set(one.kinds()) <= {"disconnected", "unsynced"}
        running = asyncio.ensure_future(one.subject.run())
        await server.start()
        await one.until_names("a")
        await one.until_fact("synced")
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await server.close()

    asyncio.run(scene())


@pytest.mark.parametrize("text", ["", "[]", "{", "contexts: 5", "current-context: x"])
def test_a_broken_kubeconfig_is_refused(tmp_path, text):
    """The error names the file and says what to do."""
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    wanted = settings.Settings(sources=(REF,), kubeconfig=str(path))
    with pytest.raises(ConfigError) as error:
        asyncio.run(follow.connect(wanted))
    assert str(path) in str(error.value)
    assert "service account" in str(error.value)


def test_a_kubeconfig_that_is_not_there_is_refused(tmp_path):
    """So is one that cannot be read."""
    wanted = settings.Settings(sources=(REF,), kubeconfig=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none"):
        asyncio.run(follow.connect(wanted))


def test_everything_in_a_cluster_is_many_pools(tmp_path):
    """Pools of all namespaces come and go; each is told of alone."""

    async def scene():
        objects = [
            making.pool("p", "one"),
            making.pod("a", "one"),
            making.pool("p", "two"),
            making.pod("b", "two", ip="10.0.0.2"),
        ]
        async with following(tmp_path, *objects, sources=(settings.Everything(),)) as one:
            assert (one.names("one/p"), one.names("two/p")) == (["a"], ["b"])
            one.told.clear()
            one.server.put(making.pod("c", "two", ip="10.0.0.3"))
            await one.until_names("b", "c", key="two/p")
            assert [set(found) for found, _ in one.told] == [{"two/p"}]
            one.server.delete(making.pool("p", "one"))
            await one.until(lambda: "one/p" not in one.pools)
            assert one.told[-1] == ({}, frozenset({"one/p"}))
            assert {path for path, _ in one.server.requests if path.endswith("/pods")} == {
                "/api/v1/pods"
            }

    asyncio.run(scene())


def test_a_service_is_a_pool_of_its_slices(tmp_path):
    """Slices alone are asked for: no pods, no CRDs."""

    async def scene():
        backends = [making.backend(), making.backend("10.0.0.2", "b", ready=False)]
        sources = (settings.Service("default", "engines", "http"),)
        objects = [making.slice_of(backends=backends)]
        async with following(tmp_path, *objects, sources=sources) as one:
            assert one.names("default/engines") == ["a"]
            one.server.put(making.slice_of(backends=[*backends, making.backend("10.0.0.3", "c")]))
            await one.until_names("a", "c", key="default/engines")
            assert {path for path, _ in one.server.requests} == {
                "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
            }

    asyncio.run(scene())


def test_pods_by_label_need_no_crd(tmp_path):
    """The selector is applied by the server; a pod that loses the label is gone."""

    async def scene():
        sources = (settings.Selector("default", {"app": "vllm"}, (8000,), "sel"),)
        objects = [making.pod("a"), making.pod("b", app="other", ip="10.0.0.2")]
        async with following(tmp_path, *objects, sources=sources) as one:
            assert one.names("default/sel") == ["a"]
            one.server.put(making.pod("b", ip="10.0.0.2"), making.pod("a", app="other"))
            await one.until_names("b", key="default/sel")
            assert {path for path, _ in one.server.requests} == {"/api/v1/namespaces/default/pods"}
            assert {query["labelSelector"] for _, query in one.server.requests} == {"app=vllm"}

    asyncio.run(scene())


def test_a_server_that_does_not_answer_is_given_up(tmp_path):
    """A list that hangs is asked for again, and so is a watch that never ends."""

    async def scene():
        silent = asyncio.Event()

        def prepare(server):
            async def hang(_):
                await silent.wait()

            server.answers.append(hang)

        hasty = {"request_s": 0.5, "watch_s": 0.01}
        objects = (making.pool(), making.pod("a"))
        async with following(tmp_path, *objects, prepare=prepare, **hasty) as one:
            assert one.kinds()[0] == "disconnected"
            assert one.names() == ["a"]
            await one.server.until_watched()
            one.server.requests.clear()
            await one.server.until(lambda seen: sum("watch" in query for _, query in seen) >= 6)
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b")
            silent.set()

    asyncio.run(scene())


def test_a_watch_that_does_not_begin_is_given_up(tmp_path):
    """It may last for minutes, but its first word comes at once."""

    async def scene():
        silent = asyncio.Event()

        async def hang(_):
            await silent.wait()

        sources = (settings.Selector("default", {"app": "vllm"}, (8000,), "sel"),)
        async with following(tmp_path, making.pod("a"), sources=sources, request_s=0.5) as one:
            await one.server.until_watched(1)
            one.server.answers.append(hang)
            one.server.drop()
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b", key="default/sel")
            assert "disconnected" in one.kinds()
            silent.set()

    asyncio.run(scene())


def test_watches_that_fail_again_and_again_end_in_a_list(tmp_path):
    """A store that was restored from a copy may not know our version, and not say 410."""

    async def scene():
        sources = (settings.Selector("default", {"app": "vllm"}, (8000,), "sel"),)
        async with following(tmp_path, making.pod("a"), sources=sources) as one:
            await one.server.until_watched(1)

            async def broken(_):
                return fake.refuse(500, "Too large resource version")

            one.server.answers.extend([broken] * 3)
            one.server.requests.clear()
            one.server.drop()
            fact = await one.until_fact("relisted")
            assert "Too large resource version" in fact.detail
            await one.server.until_watched(1)
            assert ["watch" in query for _, query in one.server.requests] == [
                *[True] * 3,
                False,
                True,
            ]

    asyncio.run(scene())


def test_credentials_that_break_are_said_so_and_read_again(tmp_path):
    """A kubeconfig that is being rewritten is no end."""

    async def scene():
        def prepare(server):
            server.token = "first"

        async with following(tmp_path, making.pool(), making.pod("a"), prepare=prepare) as one:
            await one.server.until_watched()
            (tmp_path / "kubeconfig").write_text("{")
            one.server.token = "second"
            one.server.drop()
            assert "401 Unauthorized" in (await one.until_fact("misconfigured")).detail
            one.server.put(making.pod("b", ip="10.0.0.2"))
            one.server.kubeconfig(tmp_path)
            await one.until_names("a", "b")

    asyncio.run(scene())


def test_a_broken_object_is_said_once_and_hides_itself_alone(tmp_path):
    """It is no endpoint until somebody mends it."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a"), making.pod("b")) as one:
            await one.server.until_watched()
            for _ in range(3):
                broken = making.pod("b", ip="10.0.0.2")
                broken["status"]["podIP"] = 5
                one.server.put(broken)
            one.server.put(making.pod("c", ip="10.0.0.3"))
            await one.until_names("a", "c")
            assert one.kinds().count("broken-object") == 1
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b", "c")

    asyncio.run(scene())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_the_pools_end_right(tmp_path, seed):
    """Broken watches, forgotten versions, garbage and errors at any moment, and a restart."""

    async def scene():
        chance = random.Random(seed)
        objects = (making.pool(), making.pod("p0"))
        async with following(tmp_path, *objects, request_s=2.0) as one:
            server = one.server
            await server.until_watched()

            async def broken(_):
                return fake.refuse(chance.choice([429, 500, 503, 504, 410]), "broken")

            faults = [
                server.drop,
                lambda: server.drop(last=b'{"type":"ADDED","object":{"kind'),
                server.compact,
                lambda: server.send(b"garbage\n"),
                lambda: server.send(making.line("ERROR", {"code": 500, "metadata": {}}) + b"\n"),
                lambda: server.answers.append(broken),
            ]
            alive = {0}
            for step in range(150):
                number = chance.randrange(12)
                value = making.pod(f"p{number}", ip=f"10.0.0.{number + 1}", uid=f"u{step}")
                if number in alive and chance.random() < 0.5:
                    alive.discard(number)
                    server.delete(value)
                else:
                    alive.add(number)
                    server.put(value)
                if chance.random() < 0.2:
                    chance.choice(faults)()
                if step == 75:
                    await server.stop()
                    await server.start()
                # Gives the follower its turn, mostly in the middle of something.
                await asyncio.sleep(0)
            server.put(making.pod("last", ip="10.0.1.1"))
            names = sorted(f"p{number}" for number in alive)
            await one.until_names("last", *names)
            uids = {
                value["metadata"]["name"]: value["metadata"]["uid"]
                for value in server.objects["", "pods"].values()
            }
            assert {e.name: e.uid for e in one.pools[KEY].endpoints} == uids

    asyncio.run(scene())


def test_many_changes_make_few_reports(tmp_path):
    """A burst is told of in batches, with the last state."""

    async def scene():
        async with following(tmp_path, making.pool(), making.pod("a"), coalesce_s=0.05) as one:
            await one.server.until_watched()
            for at in range(200):
                one.server.put(making.pod("b", ip=f"10.0.1.{at}"))
            last = "10.0.1.199:8000"
            await one.until(lambda: one.pools[KEY].endpoints[-1].address == last)
            assert len(one.told) < 20

    asyncio.run(scene())


SECRET = "what somebody wrote"


def poison(monkeypatch, place, name, hits):
    """Let a method raise where its arguments hit, as a bug of ours that an object sets off."""
    real = getattr(place, name)

    def raising(*args, **more):
        if hits(*args):
            raise OverflowError(SECRET)
        return real(*args, **more)

    monkeypatch.setattr(place, name, raising)


@pytest.mark.parametrize("before", [True, False])
def test_an_object_that_makes_us_raise_hides_no_other(tmp_path, monkeypatch, caplog, before):
    """Listed at the start or brought by an event, it is counted, and what follows is told of."""
    poison(
        monkeypatch,
        cluster.Cluster,
        "put",
        lambda _, __, key, ___: key[1] == "bad",
    )

    async def scene():
        bad = making.pod("bad", ip="10.0.0.66")
        listed = (bad,) if before else ()
        async with following(tmp_path, making.pool(), making.pod("a"), *listed) as one:
            assert one.names() == ["a"]
            one.server.put(*(() if before else (bad,)), making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b")
            assert one.subject._supervisor.failures["kubernetes"] >= 1

    asyncio.run(scene())
    assert SECRET not in caplog.text
    assert "OverflowError" in caplog.text


def test_a_pool_that_makes_us_raise_hides_no_other(tmp_path, monkeypatch):
    """The others are told of, and so is it once that ends."""
    wrong = [True]
    poison(
        monkeypatch,
        views.PodView,
        "found",
        lambda view: wrong[0] and view.spec.selector == {"app": "bad"},
    )
    sources = tuple(settings.InferencePoolRef("default", name) for name in ("pool", "other"))

    async def scene():
        objects = (making.pool(app="bad"), making.pool("other"), making.pod("a"))
        async with following(tmp_path, *objects, sources=sources) as one:
            assert one.names(sources[1].key) == ["a"]
            assert one.names(sources[0].key) is None
            wrong.clear()
            wrong.append(False)
            one.server.put(making.pod("b", app="bad", ip="10.0.0.2"))
            await one.until_names("b", key=sources[0].key)

    asyncio.run(scene())


def test_pools_that_could_not_be_taken_are_told_of_again(tmp_path, monkeypatch):
    """Whoever is told may raise, at the start and later: nothing that changed is lost."""

    async def scene():
        monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
        wrong = [2]
        real = Scene._on_pools

        def raising(self, found, removed):
            if wrong[0]:
                wrong[0] -= 1
                raise OverflowError(SECRET)
            real(self, found, removed)

        monkeypatch.setattr(Scene, "_on_pools", raising)
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.until_names("a")
            assert one.subject._supervisor.failures["kubernetes"] == 2
            wrong[0] = 1
            one.server.put(making.pod("b", ip="10.0.0.2"))
            await one.until_names("a", "b")
            await one.until(lambda: not one.subject._supervisor.degraded)

    asyncio.run(scene())


def test_a_feed_that_raises_stops_no_other(tmp_path, monkeypatch):
    """Its collection is followed again after a pause, from what was known."""

    async def scene():
        monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
        wrong = [3]
        real = feed.Feed.step

        async def raising(self):
            if self.collection.resource.plural == "pods" and wrong[0]:
                wrong[0] -= 1
                raise OverflowError(SECRET)
            return await real(self)

        monkeypatch.setattr(feed.Feed, "step", raising)
        async with following(tmp_path, making.pool(), making.pod("a")) as one:
            await one.until_names("a")
            assert one.subject._supervisor.failures["kubernetes"] == 3

    asyncio.run(scene())
