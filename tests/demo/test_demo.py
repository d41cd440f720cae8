import socket

from aiohttp import test_utils, web

from extproc.demo import demo, stack


def test_a_usual_port_that_is_taken_is_replaced():
    """Commands of the documentation work where they can, and the demo starts in any case."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert demo.Ports(usual=True).take(port) != port
    assert demo.Ports(usual=True).take(port) == port
    assert demo.Ports(usual=False).take(port) != port


def test_a_usual_port_is_taken_by_one_demo():
    """Demos that start together do not share ports, though Envoy binds its own at the end."""
    port = stack.free_port()
    stack._claims.pop().close()
    assert [demo.Ports(usual=True).take(port) == port for _ in range(2)] == [True, False]


def test_the_path_of_the_access_log_is_among_the_hints(tmp_path):
    """People try there first what one id of a request leads to."""
    place = demo.DemoInstallation(8080, 9901, 9090, ("127.0.0.1:8001",), tmp_path / "access.log")
    assert f"  tail {tmp_path}/access.log " in demo.render_hints(place, keep=True)


DECISION = {
    "endpoints": ["a:1"],
    "request": {"prompt_tokens": 200},
    "candidates": [
        {"endpoint": "a:1", "matched_tokens": 192},
        {"endpoint": "b:1", "matched_tokens": 0},
    ],
    "scored_candidates": [{"endpoint": "a:1", "cost": 12.4}, {"endpoint": "b:1", "cost": 99.6}],
    "cost": {"unit": "ms"},
    "runner_up": "b:1",
}


def test_a_decision_is_told_in_words():
    """The line names the cached tokens, the endpoint and the cost of the next best."""
    assert demo.render_decision(DECISION) == (
        "\nOne decision: 192 of 200 prompt tokens were cached on a:1, so the request went there,\n"
        "at an estimated 12 ms; the next best, b:1, would have taken 100 ms."
    )
    alone = {
        **DECISION,
        "scored_candidates": [{"endpoint": "a:1"}],
        "cost": None,
        "runner_up": None,
    }
    assert demo.render_decision(alone).endswith("so the request went there.")


async def test_requests_that_were_refused_are_no_decisions():
    """Some are where engines are not ready: the demo shows their number, and ends."""
    pages = {
        "/debug/decisions": {
            "decisions": [{"id": "a", "endpoint": "a:1"}, {"id": "b", "endpoint": None}]
        },
        "/debug/decisions/a": DECISION,
        "/debug/decisions/b": {"outcome": "rejection", "status": 503},
    }

    async def show(request):
        return web.json_response(pages[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", show)
    async with test_utils.TestServer(app) as server:
        place = demo.DemoInstallation(1, 2, server.port, ("a:1", "b:1"))
        assert await demo.find_decision(place, 2) == demo.render_decision(DECISION)


async def test_results_are_shown_without_children_that_have_ended():
    """One may have been killed as a test: its counters are missing, and the others count."""

    async def show(_):
        text = "vllm:prefix_cache_queries_total 40\nvllm:prefix_cache_hits_total 30\n"
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/metrics", show)
    dead_port = stack.free_port()
    dead = f"127.0.0.1:{dead_port}"
    async with test_utils.TestServer(app) as server:
        assert await demo.find_hit_ratio((dead, f"127.0.0.1:{server.port}")) == 0.75
    assert await demo.find_decision(demo.DemoInstallation(1, 2, dead_port, (dead,)), 2) == ""
