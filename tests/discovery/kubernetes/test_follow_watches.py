"""Watches of a follower: breaks, versions, bookmarks, and servers that do not answer."""

from __future__ import annotations

import asyncio

from extproc.discovery.kubernetes import settings
from tests.discovery.kubernetes import builders, fake
from tests.discovery.kubernetes.follower_scene import following


async def test_a_broken_watch_resumes_at_its_version(tmp_path):
    """After a closed or broken connection nothing is lost and nothing is listed again."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        lists = sum("watch" not in query for _, query in scene.server.requests)
        for at, last in enumerate((b"", b'{"type":"MODIFIED","object":{"meta')):
            scene.server.drop(last=last)
            scene.server.put(builders.pod(f"b{at}", ip=f"10.0.1.{at}"))
            await scene.until(lambda name=f"b{at}": name in scene.names())
        assert sum("watch" not in query for _, query in scene.server.requests) == lists
        assert scene.names() == ["a", "b0", "b1"]


async def test_an_expired_version_is_listed_again(tmp_path):
    """410 as an answer and 410 as an event both end in a fresh list."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        scene.server.delete(builders.pod("a"))
        scene.server.compact()
        scene.server.drop()
        await scene.until_names("b")
        scene.server.put(builders.pod("c", ip="10.0.0.3"))
        await scene.until_names("b", "c")
        scene.facts.clear()
        gone = {"kind": "Status", "status": "Failure", "code": 410, "message": "too old"}
        scene.server.send(builders.line("ERROR", gone) + b"\n")
        await scene.until_fact("relisted")
        scene.server.put(builders.pod("d", ip="10.0.0.4"))
        await scene.until_names("b", "c", "d")


async def test_a_bookmark_moves_the_version(tmp_path):
    """After a quiet time the watch goes on from the bookmark, which is not forgotten yet."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        scene.server.compact()
        mark = {"kind": "Pod", "metadata": {}}
        scene.server.send(builders.line("BOOKMARK", mark, str(scene.server.version)) + b"\n")
        scene.server.requests.clear()
        scene.server.drop()
        await scene.server.until_watched()
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_names("a", "b")
        assert "relisted" not in scene.kinds()


async def test_an_invalid_event_is_followed_by_a_list(tmp_path):
    """Missed events are unknown, so everything is listed again."""
    async with following(tmp_path, builders.pool(), builders.pod("a")) as scene:
        await scene.server.until_watched()
        scene.server.send(b"<html>gateway</html>\n")
        await scene.until_fact("unreadable")
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_names("a", "b")


async def test_long_lists_are_read_in_pages(tmp_path):
    """A list of many pages is complete."""
    pods = [builders.pod(f"p{at:02}", ip=f"10.0.0.{at}") for at in range(25)]
    sources = (settings.PodSelector("default", "sel", {"app": "vllm"}, (8000,)),)
    async with following(tmp_path, *pods, sources=sources, page=10) as scene:
        assert scene.names("default/sel") == [f"p{at:02}" for at in range(25)]
        assert "relisted" not in scene.kinds()
        assert [query.get("limit") for _, query in scene.server.requests[:3]] == ["10"] * 3


async def test_a_list_whose_tokens_expire_is_read_without_pages(tmp_path):
    """Pages that come slower than their tokens expire would never end either."""
    pods = [builders.pod(f"p{at:02}", ip=f"10.0.0.{at}") for at in range(25)]

    def prepare(server):
        async def expire(request):
            server.answers.append(expire)
            if request.query.get("continue"):
                return fake.refuse(410, "The provided continue parameter is too old")
            if "limit" not in request.query:
                server.answers.clear()
            return server.list_objects(
                request, fake.Matching(*fake.where(request.path), request.query)
            )

        server.answers.append(expire)

    sources = (settings.PodSelector("default", "sel", {"app": "vllm"}, (8000,)),)
    async with following(tmp_path, *pods, sources=sources, prepare=prepare, page=10) as scene:
        assert scene.names("default/sel") == [f"p{at:02}" for at in range(25)]
        assert scene.kinds() == ["relisted", "synced"]
        assert [query.get("limit") for _, query in scene.server.requests[:3]] == [
            "10",
            "10",
            None,
        ]


async def test_a_request_without_an_answer_times_out(tmp_path):
    """A list that hangs is asked for again, and so is a watch that never ends."""
    silent = asyncio.Event()

    def prepare(server):
        async def hang(_):
            await silent.wait()

        server.answers.append(hang)

    hasty = {"request_s": 0.5, "watch_s": 0.01}
    objects = (builders.pool(), builders.pod("a"))
    async with following(tmp_path, *objects, prepare=prepare, **hasty) as scene:
        assert scene.kinds()[0] == "disconnected"
        assert scene.names() == ["a"]
        await scene.server.until_watched()
        scene.server.requests.clear()
        await scene.server.until(
            lambda requests: sum("watch" in query for _, query in requests) >= 6
        )
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_names("a", "b")
        silent.set()


async def test_a_watch_without_a_first_byte_times_out(tmp_path):
    """It may last for minutes, but its first word comes at once."""
    silent = asyncio.Event()

    async def hang(_):
        await silent.wait()

    sources = (settings.PodSelector("default", "sel", {"app": "vllm"}, (8000,)),)
    async with following(tmp_path, builders.pod("a"), sources=sources, request_s=0.5) as scene:
        await scene.server.until_watched(1)
        scene.server.answers.append(hang)
        scene.server.drop()
        scene.server.put(builders.pod("b", ip="10.0.0.2"))
        await scene.until_names("a", "b", key="default/sel")
        assert "disconnected" in scene.kinds()
        silent.set()


async def test_repeated_watch_failures_are_followed_by_a_list(tmp_path):
    """A store that was restored from a copy may not know our version, and not say 410."""
    sources = (settings.PodSelector("default", "sel", {"app": "vllm"}, (8000,)),)
    async with following(tmp_path, builders.pod("a"), sources=sources) as scene:
        await scene.server.until_watched(1)

        async def broken(_):
            return fake.refuse(500, "Too large resource version")

        # A watch without a line is a failure as well.
        mark = {"kind": "Pod", "metadata": {}}
        scene.server.send(builders.line("BOOKMARK", mark, str(scene.server.version)) + b"\n")
        scene.server.answers.extend([broken] * 3)
        scene.server.requests.clear()
        scene.server.drop()
        fact = await scene.until_fact("relisted")
        assert "Too large resource version" in fact.detail
        await scene.server.until_watched(1)
        assert ["watch" in query for _, query in scene.server.requests] == [
            *[True] * 3,
            False,
            True,
        ]
