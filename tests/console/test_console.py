"""The console in a real browser, beside a picker of this process whose traffic is written by hand."""

from __future__ import annotations

import json
import random
import time

import msgspec
import pytest

from extproc.config.pool_sections import PoolSection
from extproc.config.reloading import Change
from extproc.decision import bad_request
from extproc.request import HttpRequest
from extproc.routing.pool_match import PoolMatch
from extproc.scheduling import registry
from extproc.scheduling.shadow import ShadowScheduler
from extproc.server import app
from extproc.server.reload import ReloadResult
from extproc.telemetry.decision_log import RejectionRecord
from tests.console import browser
from tests.console.console_scene import HOSTILE, HOSTS, ConsoleScene, busy_scene, engines, picker
from tests.support import disaggregation, serving

VIEWS = ("overview", "decisions", "dry-run", "strategies", "configuration")


@pytest.fixture(scope="module")
def scene(live, chromium):
    with live.holding(busy_scene()) as item:
        yield item


async def test_a_refused_request_is_explained_where_its_retry_has_its_id(scene, chromium):
    """The row of the refusal leads to the refusal, and that of the retry to the retry."""
    refusal = RejectionRecord("twice", time.monotonic(), "", "demo", bad_request("no JSON"))
    scene.picker.decisions.add_rejection(refusal)
    address = scene.route("twice")
    async with chromium.page(scene.port) as page:
        for at, text in enumerate((address, "no JSON")):
            await page.open("#/decisions")
            await page.page.get_by_role("link", name="twice", exact=True).nth(at).click()
            shown = "document.querySelector('#decision-explanation').textContent"
            await page.until(f"{shown}.includes('{text}')")
            await page.until(f"{shown}.includes('Same id2 requests: ')")
        other = page.page.locator("#decision-explanation a[href^='#/decision/twice/']")
        await other.click()
        await page.until(f"{shown}.includes('{address}')")
        assert page.complaints == []


@pytest.mark.parametrize("request_id", ["..", ".", "a/../b"])
async def test_a_request_whose_id_is_a_path_is_explained(scene, chromium, request_id):
    """Browsers shorten paths, but not queries."""
    address = scene.route(request_id)
    async with chromium.page(scene.port) as page:
        await page.open("#/decisions")
        await page.page.get_by_role("link", name=request_id, exact=True).click()
        shown = "document.querySelector('#decision-explanation').textContent"
        await page.until(f"{shown}.includes('{address}')")
        assert page.complaints == []


async def test_stages_of_other_endpoints_are_shown(scene, chromium):
    """The endpoint that computes the prompt, and why no other one encodes."""
    decision = msgspec.structs.replace(disaggregation.decide(), profile="adaptive")
    scene.picker.decisions.add("split", decision, time.monotonic())
    prefill = decision.disaggregation.prefill.endpoints[0].address
    async with chromium.page(scene.port) as page:
        await page.open("#/decision/split")
        shown = "document.querySelector('#decision-explanation').textContent"
        text = f"Prefill by{prefill}Encode bythe chosen endpoint itself: no-media"
        await page.until(f"{shown}.includes('{text}')")
        assert page.complaints == []


@pytest.mark.slow
async def test_every_view_is_accessible_and_quiet(scene, chromium):
    """At both widths, light and dark: axe finds nothing serious, the browser's console is empty."""
    for size, scheme in ((browser.DESKTOP, "light"), (browser.PHONE, "dark")):
        async with chromium.page(scene.port, size, scheme) as page:
            for view in (*VIEWS, "decision/request-3"):
                await page.open(f"#/{view}")
                await page.until("document.querySelector('main section:not([hidden])')")
                assert await page.violations() == [], view
                assert not await page.is_too_wide(), view
            assert page.complaints == []


async def test_a_decision_is_one_click_away(scene, chromium):
    """The overview lists endpoints and decisions; a click explains one of them."""
    address = scene.route("the-last-one")
    async with chromium.page(scene.port) as page:
        await page.open()
        await page.until(f"document.querySelectorAll('#endpoints tbody tr').length == {len(HOSTS)}")
        await page.page.get_by_role("link", name="the-last-one").click()
        await page.page.wait_for_selector(".answer")
        assert f"It went to {address}, " in await page.text(".answer")
        assert await page.text(".bars li.chosen .address") == address
        result = await page.text("#decision-explanation")
        assert "ok 200" in result
        assert "prompt 400, completion 20" in result
        assert page.complaints == []


async def test_a_pool_is_shown_by_itself(chromium, monkeypatch):
    """Figures, charts, endpoints and decisions are of the chosen pool; the address keeps the choice."""
    # The process takes one sample when it starts, and no further one beside those of the test.
    monkeypatch.setattr(app, "INTERVAL_S", 3600.0)
    async with engines() as addresses:
        match = PoolMatch(hosts=("chat",))
        pools = (
            PoolSection(name="chat", endpoints=tuple(addresses[:2]), match=match),
            PoolSection(name="code", endpoints=(addresses[2],)),
        )
        settings = msgspec.structs.replace(serving.settings(), pools=pools)
        async with (
            serving.running(settings) as running,
            chromium.page(running.ports.pages) as page,
        ):
            await running.picker.sync()
            scene, picker = ConsoleScene(running), running.picker
            for at in (0.0, 5.0):
                picker.history.sample(picker.counters, picker.pool_registry.views(), at)
                for number in range(20):
                    scene.route(f"{at}-{number}", pool="chat")
                    picker.counters.streams["ok"] += 1
            scene.route("of-code", pool="code")
            await page.open()
            await page.until("document.querySelectorAll('#endpoints tbody tr').length == 3")
            chart = page.page.locator("#rate-chart svg")
            assert "routed 4.0" in await chart.get_attribute("aria-label")
            assert await page.text("#last-decisions tbody th") == "of-code"
            times = page.page.locator("#ttft-chart svg")
            for name, endpoints, routed, title in (
                ("code", 1, "routed 0", "Time to first token"),
                ("chat", 2, "routed 4.0", "Time to answer: none was streamed"),
            ):
                await page.page.locator("#pool").select_option(name)
                await page.until(
                    f"document.querySelectorAll('#endpoints tbody tr').length == {endpoints}"
                )
                assert routed in await chart.get_attribute("aria-label")
                assert (await times.get_attribute("aria-label")).startswith(f"{title}, now: p95 ")
                assert page.page.url.endswith(f"#/overview/{name}")
            assert "of-code" not in await page.text("#last-decisions")
            assert await page.violations() == []
            await page.page.reload()
            await page.until("document.querySelectorAll('#endpoints tbody tr').length == 2")
            assert await page.page.locator("#pool").input_value() == "chat"
            await page.page.locator("#pool").select_option("all together")
            await page.until("document.querySelectorAll('#endpoints tbody tr').length == 3")
            assert page.complaints == []


async def test_all_pools_are_shown_in_place_of_one_that_is_gone(scene, chromium):
    """A line names it until another choice."""
    async with chromium.page(scene.port) as page:
        await page.open("#/overview/gone")
        await page.until("document.querySelectorAll('#endpoints tbody tr').length == 3")
        assert "no pool gone now" in await page.text("#pool-gone")
        assert await page.page.locator("#failure").is_hidden()
        await page.page.locator("nav a[href='#/overview']").click()
        await page.page.wait_for_selector("#pool-gone", state="hidden")


async def test_text_of_clients_is_text(scene, chromium):
    """Markup in a model name and a request id is shown as it is, and does nothing."""
    async with chromium.page(scene.port) as page:
        await page.open("#/decisions")
        await page.page.get_by_label("Result").select_option("failed")
        await page.until("document.querySelectorAll('#decisions-list tbody tr').length == 1")
        assert await page.text("#decisions-list td.name") == HOSTILE
        await page.page.get_by_role("link", name="id <img").click()
        await page.page.wait_for_selector(".answer")
        assert HOSTILE in await page.text("#decision-title")
        assert HOSTILE in await page.text("#decision-explanation")
        assert await page.page.locator("main img").count() == 0
        assert page.complaints == []


async def test_keyboard_alone_is_enough(scene, chromium):
    """The skip link, the views and a decision are reached by Tab and Enter; focus follows."""
    async with chromium.page(scene.port) as page:
        await page.open()
        await page.page.wait_for_selector("#last-decisions tbody tr")
        press = page.page.keyboard.press
        await press("Tab")
        assert await page.page.evaluate("document.activeElement.className") == "skip"
        await press("Enter")
        assert await page.page.evaluate("document.activeElement.id") == "main"
        for _ in range(10):
            await press("Tab")
            if await page.page.evaluate("document.activeElement.matches('#last-decisions a')"):
                break
        await press("Enter")
        await page.page.wait_for_selector(".answer")
        assert await page.page.evaluate("document.activeElement.id") == "decision-title"


async def test_focus_stays_on_a_row_when_those_before_it_go(scene, chromium):
    """A list that is read again moves none of the rows that stay."""
    end_first, _ = scene.open("focus-stays")
    end_second, _ = scene.open("focus-before")
    try:
        async with chromium.page(scene.port) as page:
            await page.open("#/decisions")
            await page.page.get_by_label("Request id").fill("focus-")
            await page.page.get_by_label("Result").select_option("open")
            rows = "document.querySelectorAll('#decisions-list tbody tr').length"
            await page.until(f"{rows} == 2")
            await page.page.get_by_role("link", name="focus-stays").focus()
            end_second()
            await page.until(f"{rows} == 1")
            assert await page.page.evaluate("document.activeElement.textContent") == "focus-stays"
    finally:
        end_first()


async def test_what_is_opened_stays_open_while_its_request_is(scene, chromium):
    """Only what came of the request is shown anew, until it has ended."""
    end, _ = scene.open("being-answered")
    async with chromium.page(scene.port) as page:
        await page.open("#/decision/being-answered")
        await page.page.get_by_text("Numbers").click()
        await page.page.wait_for_selector("#state >> text=live")
        for _ in range(2):
            async with page.page.expect_response("**/debug/decision?*"):
                pass
        assert await page.page.locator("details").get_attribute("open") is not None
        end()
        await page.until(
            "document.querySelector('#decision-explanation').textContent.includes('ok 200')"
        )
        assert await page.page.locator("details").get_attribute("open") is not None
        await page.page.wait_for_selector("#state >> text=connected")
        assert page.complaints == []


async def test_a_page_that_is_loaded_again_behind_the_skip_link_has_a_view(scene, chromium):
    """The address names the content then, which is no view."""
    async with chromium.page(scene.port) as page:
        await page.open("#main")
        await page.page.wait_for_selector("#endpoints tbody tr")
        assert page.complaints == []


async def test_a_dry_run_says_where_a_request_would_go(scene, chromium):
    """The pasted body is explained as by `extproc explain`; what cannot be read has a reason."""
    async with chromium.page(scene.port) as page:
        await page.open("#/dry-run")
        await page.page.get_by_role("button", name="Explain").click()
        await page.page.wait_for_selector("#dry-run-explanation .answer")
        assert "This request would go to 127.0.0." in await page.text("#dry-run-explanation")
        assert page.complaints == []
        await page.page.get_by_label("Body of the request").fill("{")
        await page.page.get_by_role("button", name="Explain").click()
        await page.page.wait_for_selector("#dry-run-explanation .failure")
        assert "status 400" in await page.text("#dry-run-explanation")


async def test_a_dry_run_takes_the_headers_that_were_written(scene, chromium):
    """An authority selects pools as a host does; a line that is no header is named."""
    async with chromium.page(scene.port) as page:
        await page.open("#/dry-run")
        headers = page.page.get_by_label("Headers")
        await headers.fill(
            "\n:authority: chat.example:80\nx-tenant : a: b\nContent-Type: text/json"
        )
        async with page.page.expect_request("**/debug/explain") as sent:
            await page.page.get_by_role("button", name="Explain").click()
        request = await sent.value
        assert request.headers["x-explain-header-host"] == "chat.example:80"
        assert request.headers["x-explain-header-x-tenant"] == "a: b"
        assert request.headers["x-explain-header-content-type"] == "text/json"
        await page.page.wait_for_selector("#dry-run-explanation .answer")
        for line in ("x-tenant", ":path: /v1/models"):
            await headers.fill(line)
            await page.page.get_by_role("button", name="Explain").click()
            await page.page.wait_for_selector(f"#dry-run-explanation >> text={line}")


async def test_an_unknown_view_is_the_overview(scene, chromium):
    """Also where its name is that of a property of all objects."""
    async with chromium.page(scene.port) as page:
        await page.open("#/constructor")
        await page.page.wait_for_selector("#endpoints tbody tr")
        assert page.complaints == []


async def test_strategies_are_compared(scene, chromium):
    """The choices as they were routed are the first row, before those of every strategy."""
    async with chromium.page(scene.port) as page:
        await page.open("#/strategies")
        await page.page.get_by_role("button", name="Compare").click()
        await page.page.wait_for_selector("#strategies-result tr.chosen")
        row = await page.text("#strategies-result tr.chosen")
        assert row.split()[:3] == ["adaptive", "as", "routed"]
        assert "100 %" in row
        assert "least-request" in await page.text("#strategies-result")
        assert page.complaints == []


async def test_a_comparison_without_an_answer_is_reported(scene, chromium):
    """The reason stands in the place of the table, and the next attempt replaces it."""
    async with chromium.page(scene.port) as page:
        await page.open("#/strategies")
        await page.page.route("**/debug/strategies", lambda route: route.abort())
        compare = page.page.get_by_role("button", name="Compare")
        await compare.click()
        await page.page.wait_for_selector("#strategies-result .failure")
        assert "the picker does not answer" in await page.text("#strategies-result")
        await page.page.unroute("**/debug/strategies")
        await compare.click()
        await page.page.wait_for_selector("#strategies-result tr.chosen")
        assert not any(text.startswith("exception") for text in page.complaints)


async def test_shadows_stand_beside_strategies(scene, chromium):
    """Without one there is nothing; with one its agreement and its expected saving."""
    director = scene.picker.pool_registry.by_name[""].parts.director
    routing = director.routing
    second = ShadowScheduler(
        registry.profiles()["adaptive"],
        sample_ratio=1.0,
        rng=random.Random(1),
        stopwatch=lambda: 0.0,
        on_pending=lambda: None,
    )
    async with chromium.page(scene.port) as page:
        await page.open("#/strategies")
        assert await page.text("#shadow-result") == ""
        director.reconfigure(msgspec.structs.replace(routing, shadow=second))
        try:
            now = time.monotonic()
            message = {"role": "user", "content": "word " * 400}
            body = json.dumps({"model": "demo", "messages": [message]}).encode()
            headers = {":method": "POST", ":path": "/v1/chat/completions"}
            decision = director.route(HttpRequest(headers, body), now)
            director.release(director.reserve(decision, now), now, answered=True)
            second.run_pending(1.0)
            await page.open("#/overview")
            await page.open("#/strategies")
            await page.page.wait_for_selector("#shadow-result tbody tr")
            row = await page.text("#shadow-result tbody tr")
            assert row.split()[:6] == ["default", "adaptive", "100", "%", "1", "100"]
        finally:
            director.reconfigure(routing)
        assert page.complaints == []


async def test_configuration_has_a_history(scene, chromium):
    """Settings, a reload with its changes, and refused ones, of which the overview names the last."""
    change = Change("log.level", '"info"', '"debug"', is_live=True)
    scene.picker.reloads.add(ReloadResult(changes=(change,)))
    scene.picker.reloads.add(ReloadResult(error="log.level: expected a level"))
    try:
        async with chromium.page(scene.port) as page:
            await page.open("#/configuration")
            await page.page.wait_for_selector(".history .failure")
            text = await page.text("#configuration-result")
            assert "pool.endpoints" in text
            assert 'log.level: "info" became "debug"' in text
            assert "log.level: expected a level" in text
            await page.open("#/overview")
            await page.page.wait_for_selector(".problem.critical")
            assert "configuration was refused" in await page.text("#problems")
            scene.picker.reloads.add(ReloadResult(error="log.format: expected a format"))
            await page.page.wait_for_selector(".problem.critical >> text=log.format")
    finally:
        scene.picker.reloads.add(ReloadResult())


async def test_a_token_is_wanted_and_sent(chromium, tmp_path):
    """With an admin token the page asks for it, and reads data once it has the right one."""
    file = tmp_path / "token"
    file.write_text("right")
    async with (
        picker(admin_token_file=str(file)) as running,
        chromium.page(running.ports.pages) as page,
    ):
        await page.open()
        for token in ("right\N{HORIZONTAL ELLIPSIS}", "wrong", "right"):
            await page.page.get_by_label("Token").fill(token)
            await page.page.get_by_role("button", name="Continue").click()
        await page.page.wait_for_selector("#endpoints tbody tr")
        assert not await page.page.locator("#token-form").is_visible()
        assert not any(text.startswith("exception") for text in page.complaints)


async def test_a_token_that_was_replaced_is_asked_for_by_every_view(chromium, tmp_path):
    """Also by those that read nothing until a button is pressed, and none takes it for a decision."""
    file = tmp_path / "token"
    file.write_text("old")
    async with (
        picker(admin_token_file=str(file)) as running,
        chromium.page(running.ports.pages) as page,
    ):

        async def send(token):
            await page.page.get_by_label("Token").fill(token)
            await page.page.get_by_role("button", name="Continue").click()
            await page.page.wait_for_selector("#state[data-state=connected]")
            assert not await page.page.locator("#token-form").is_visible()

        await page.open("#/strategies")
        await send("old")
        for token, view, button in (
            ("new one", "Strategies", "Compare"),
            ("x", "Dry run", "Explain"),
        ):
            await page.page.get_by_role("link", name=view).click()
            await page.page.wait_for_selector("#state[data-state=connected]")
            file.write_text(token)
            await page.page.get_by_role("button", name=button).click()
            await page.page.wait_for_selector("#token-form", state="visible")
            await send(token)
        assert "The client" not in await page.text("#dry-run-explanation")
        await page.page.get_by_role("button", name="Explain").click()
        await page.page.wait_for_selector("#dry-run-explanation >> text=The client would get")
        assert not any(text.startswith("exception") for text in page.complaints)


@pytest.mark.slow
async def test_a_picker_that_goes_away_is_told(chromium):
    """The page says that the connection is lost, and keeps what it has."""
    async with chromium.page(0) as page:
        async with picker() as running:
            page.base = f"http://127.0.0.1:{running.ports.pages}"
            await page.open()
            await page.page.wait_for_selector("#endpoints tbody tr")
        await page.page.wait_for_selector("#state[data-state=lost]")
        assert "does not answer" in await page.text("#failure")
        assert await page.page.locator("#endpoints tbody tr").count() == len(HOSTS)


async def test_an_answer_that_breaks_off_is_read_again(scene, chromium):
    """The page reports it as a lost connection, and is live again with the next whole answer."""
    async with chromium.page(scene.port) as page:
        await page.open()
        await page.page.wait_for_selector("#state[data-state=live]")
        await page.page.route("**/debug/**", lambda route: route.fulfill(body='{"pools": ['))
        await page.page.wait_for_selector("#state[data-state=lost]")
        assert "does not answer" in await page.text("#failure")
        await page.page.unroute("**/debug/**")
        await page.page.wait_for_selector("#state[data-state=live]")
        assert not await page.page.locator("#failure").is_visible()
        assert page.complaints == []


async def test_an_answer_that_never_comes_is_not_waited_for(scene, chromium):
    """A connection that broke without a word is reported, and the next one is live."""
    async with chromium.page(scene.port) as page:
        await page.page.clock.install()
        await page.open()
        await page.page.wait_for_selector("#state[data-state=live]")
        async with page.page.expect_request("**/debug/overview*"):
            await page.page.route("**/debug/**", lambda _: None)
        await page.page.clock.fast_forward(20_000)
        await page.page.wait_for_selector("#state[data-state=lost]")
        assert "does not answer" in await page.text("#failure")
        await page.page.unroute("**/debug/**")
        await page.page.wait_for_selector("#state[data-state=live]")
        assert page.complaints == []


async def test_a_view_that_failed_is_read_again(scene, chromium):
    """Views that are read once are read until they have their data; a pause stops that."""
    async with chromium.page(scene.port) as page:
        await page.open()
        await page.page.route("**/debug/**", lambda route: route.abort())
        await page.page.get_by_role("link", name="Configuration").click()
        await page.until("document.getElementById('failure').textContent.includes('Trying again')")
        pause = page.page.get_by_role("button", name="Pause")
        await pause.click()
        await page.until("document.getElementById('failure').textContent.includes('Press Pause')")
        await pause.click()
        await page.page.unroute("**/debug/**")
        await page.page.wait_for_selector("#state[data-state=connected]")
        assert "pool.endpoints" in await page.text("#configuration-result")
        assert not await page.page.locator("#failure").is_visible()
