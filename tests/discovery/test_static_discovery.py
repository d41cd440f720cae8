import asyncio
import errno
import os
import random

import pytest

from extproc.discovery import endpoint_list, static_discovery
from extproc.errors import ConfigError


class ListedFleet:
    def __init__(self):
        self.updates = []

    def set_endpoints(self, endpoints, now):
        self.updates.append(([endpoint.address for endpoint in endpoints], now))


class Resolver:
    def __init__(self, **answers):
        self.answers = answers
        self.queries = []

    async def resolve(self, names):
        self.queries.append(names)
        return {name: self.answers.get(name, ()) for name in names}


class StaticScene:
    def __init__(self, *flags, path="", **answers):
        self.now = 0.0
        self.store = ListedFleet()
        self.resolver = Resolver(**answers)
        self.facts = []
        self.subject = static_discovery.StaticDiscovery(
            static_discovery.StaticDiscoverySettings(file=str(path), jitter=0.0),
            self.store,
            flag_entries=endpoint_list.from_document(
                {"endpoints": ",".join(flags).split(",") if flags else []}, where="f"
            ),
            resolver=self.resolver,
            clock=lambda: self.now,
            rng=random.Random(1),
            on_event=self.facts.append,
        )

    def kinds(self):
        return [fact.kind for fact in self.facts]

    async def step(self, at):
        self.now = at
        await self.subject.step()


def write(path, *addresses):
    """Replaces the file as an editor does, so that its inode changes."""
    draft = path.with_suffix(".new")
    draft.write_text("endpoints:\n" + "".join(f'- "{address}"\n' for address in addresses))
    draft.rename(path)


async def test_static_endpoints_are_reported_once():
    """A static list is published once at the start, and no name is resolved."""
    scene = StaticScene("10.0.0.1:1,[fd00::1]:1")
    await scene.subject.start()
    await scene.step(1000.0)
    assert scene.store.updates == [(["10.0.0.1:1", "[fd00::1]:1"], 0.0)]
    assert scene.resolver.queries == []


async def test_an_empty_list_is_reported():
    """The store is notified of an empty first result of discovery."""
    scene = StaticScene()
    await scene.subject.start()
    assert scene.store.updates == [([], 0.0)]


async def test_a_changed_file_is_read_at_the_next_poll(tmp_path):
    """A new file replaces the endpoints; the flags stay in front."""
    path = tmp_path / "pool.yaml"
    write(path, "10.0.0.2:1")
    scene = StaticScene("10.0.0.1:1", path=path)
    await scene.subject.start()
    await scene.step(1.0)
    write(path, "10.0.0.3:1", "10.0.0.2:1")
    await scene.step(2.0)
    await scene.step(3.0)
    assert scene.store.updates == [
        (["10.0.0.1:1", "10.0.0.2:1"], 0.0),
        (["10.0.0.1:1", "10.0.0.3:1", "10.0.0.2:1"], 2.0),
    ]


async def test_an_invalid_file_keeps_the_endpoints(tmp_path):
    """A broken or vanished file is said once and changes nothing; a mended one is taken."""
    path = tmp_path / "pool.yaml"
    write(path, "10.0.0.2:1")
    scene = StaticScene(path=path)
    await scene.subject.start()
    path.write_text("endpoints: [{adress: 10.0.0.3, port: 1}]")
    await scene.step(1.0)
    await scene.step(2.0)
    path.unlink()
    await scene.step(3.0)
    assert scene.kinds() == ["list-replaced", "file-broken", "file-broken"]
    assert "did you mean `address`?" in scene.facts[1].detail
    assert len(scene.store.updates) == 1
    write(path, "10.0.0.4:1")
    await scene.step(4.0)
    assert scene.store.updates[-1] == (["10.0.0.4:1"], 4.0)


def test_a_file_that_could_not_be_opened_is_tried_again(tmp_path, monkeypatch):
    """Its error is reported once; what made it unreadable may end without a change of the file."""

    async def scene():
        path = tmp_path / "pool.yaml"
        write(path, "10.0.0.2:1")
        scene = StaticScene(path=path)
        await scene.subject.start()
        write(path, "10.0.0.3:1")
        with monkeypatch.context() as patched:
            patched.setattr(static_discovery, "open_regular", refuse)
            await scene.step(1.0)
            await scene.step(2.0)
        await scene.step(3.0)
        assert scene.kinds() == ["list-replaced", "file-broken", "list-replaced"]
        assert "Too many open files" in scene.facts[1].detail
        assert scene.store.updates[-1] == (["10.0.0.3:1"], 3.0)

    def refuse(name, flags):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)

    asyncio.run(scene())


def test_a_file_broken_at_start_is_an_error(tmp_path):
    """A pool that cannot be read prevents the start."""
    with pytest.raises(ConfigError, match="No such file"):
        asyncio.run(StaticScene(path=tmp_path / "pool.yaml").subject.start())


async def test_names_are_resolved_again_when_due():
    """Names are resolved at start and at every refresh, and only differences are published."""
    scene = StaticScene("engines:1", engines=("10.0.0.1",))
    await scene.subject.start()
    await scene.step(29.0)
    await scene.step(30.0)
    assert len(scene.resolver.queries) == 2
    scene.resolver.answers["engines"] = ("10.0.0.2", "10.0.0.1")
    await scene.step(60.0)
    assert scene.store.updates == [
        (["10.0.0.1:1"], 0.0),
        (["10.0.0.1:1", "10.0.0.2:1"], 60.0),
    ]


async def test_a_failing_name_is_logged_once_and_retried_sooner():
    """The last answer stays, one fact is given per outage, and the next try comes early."""
    scene = StaticScene("engines:1,ghosts:1", engines=("10.0.0.1",))
    await scene.subject.start()
    assert scene.kinds() == ["name-missing", "list-replaced"]
    scene.resolver.answers.clear()
    await scene.step(3.0)
    await scene.step(6.0)
    assert scene.kinds() == ["name-missing", "list-replaced", "name-kept"]
    assert len(scene.store.updates) == 1
    assert len(scene.resolver.queries) == 3
    scene.resolver.answers["engines"] = ("10.0.0.1",)
    await scene.step(9.0)
    scene.resolver.answers.clear()
    await scene.step(12.0)
    assert scene.kinds().count("name-kept") == 2


async def test_addresses_beyond_the_bound_are_logged_once_and_when_they_fit_again():
    """A pool that is cut says how many addresses it lacks, and when it lacks none."""
    many = {
        f"engines-{at}": tuple(f"10.{at}.{n // 250}.{n % 250}" for n in range(4000))
        for at in range(5)
    }
    scene = StaticScene(",".join(f"{name}:1" for name in many), **many)
    await scene.subject.start()
    assert scene.kinds() == ["list-replaced", "truncated"]
    assert "3616 addresses are left out" in scene.facts[1].detail
    assert scene.subject.dropped_addresses == 3616
    scene.resolver.answers["engines-0"] = many["engines-0"][:3999]
    await scene.step(40.0)
    assert scene.kinds().count("truncated") == 1
    assert scene.subject.dropped_addresses == 3615
    scene.resolver.answers["engines-0"] = many["engines-0"][:1]
    await scene.step(80.0)
    assert scene.kinds() == [
        "list-replaced",
        "truncated",
        "list-replaced",
        "list-replaced",
        "complete",
    ]
    assert scene.subject.dropped_addresses == 0


async def test_the_loop_steps_until_cancelled(tmp_path):
    """`run` looks again and again, and ends when cancelled."""
    path = tmp_path / "pool.yaml"
    write(path, "10.0.0.1:1")
    scene = StaticScene(path=path)
    changed = asyncio.Event()
    subject = static_discovery.StaticDiscovery(
        static_discovery.StaticDiscoverySettings(file=str(path), poll_s=0.001),
        scene.store,
        flag_entries=(),
        resolver=scene.resolver,
        clock=lambda: 0.0,
        rng=random.Random(1),
        on_event=lambda fact: changed.set() if len(scene.store.updates) == 2 else None,
    )
    await subject.start()
    task = asyncio.ensure_future(subject.run())
    write(path, "10.0.0.2:1")
    async with asyncio.timeout(300.0):
        await changed.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert scene.store.updates[-1][0] == ["10.0.0.2:1"]
