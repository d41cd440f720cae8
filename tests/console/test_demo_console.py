"""`extproc demo --keep` and the console: from the start to a decision in three actions, with pictures.

`EXTPROC_SCREENSHOTS=docs/assets` writes the pictures that README and documentation show.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from extproc.demo import stack, traffic
from tests.console import browser

pytestmark = pytest.mark.slow

MODEL, ADAPTERS = "demo-model", ("sql-lora", "chat-lora", "code-lora", "docs-lora")

#: Colors of a picture: text and areas need no more, and files stay small.
COLORS = 256


class Demo:
    """A demo that stays, and its addresses.

    Attributes:
        console: Address of the console as the demo printed it.
        pages: Port of the picker's pages.
        envoy: Port of Envoy.
    """

    def __init__(self, printed):
        self.console = re.search(r"Console: (\S+)", printed)[1]
        self.pages = int(re.search(r":(\d+)/console/", printed)[1])
        self.envoy = int(re.search(r"curl 127.0.0.1:(\d+)/v1/", printed)[1])

    async def talk_again_and_again(self):
        """Hold further conversations until cancelled."""
        seed = 1
        while True:
            seed += 1
            talks = traffic.conversations(12, 3, model=MODEL, adapters=ADAPTERS, seed=seed)
            url = f"http://127.0.0.1:{self.envoy}"
            await traffic.play(url, talks, at_once=6, on_answer=lambda _: None)


@contextlib.asynccontextmanager
async def _demo():
    printed = []
    argv = [sys.executable, "-m", "extproc", "demo", "--keep", "--conversations", "8"]
    # The last line; one before it may already be followed by it when the wait for that one ends.
    child = await stack.Child.start("demo", argv, ready="/stats", log=printed.append)
    try:
        demo = Demo("\n".join(printed))
        talking = asyncio.get_running_loop().create_task(demo.talk_again_and_again())
        try:
            yield demo
        finally:
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking
    finally:
        await child.stop()


@pytest.fixture(scope="module")
def demo(live, chromium):
    with live.holding(_demo()) as item:
        yield item


@pytest.fixture
def folder(tmp_path):
    """Folder for pictures."""
    return Path(os.environ.get("EXTPROC_SCREENSHOTS", tmp_path))


async def take_picture(page, path):
    """Write the window as a small PNG."""
    await page.page.wait_for_load_state("networkidle")
    data = await page.page.screenshot(animations="disabled")
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(COLORS)
    picture.save(path, optimize=True)
    assert path.stat().st_size < 150_000


async def test_three_actions_lead_to_the_reason(demo, chromium, folder):
    """Start the demo, open the address that it prints, click a request: there is the reason."""
    async with chromium.page(demo.pages) as page:
        await page.page.goto(demo.console)
        await page.until("document.querySelectorAll('#last-decisions tbody tr').length >= 10")
        # A minute of traffic, in steps of 5 s.
        await page.until(
            "document.querySelector('path.line-a').getAttribute('d').split('L').length > 12"
        )
        await take_picture(page, folder / "console-overview.png")
        row = page.page.locator("#last-decisions tbody tr", has_text="next 127").first
        endpoint = await row.locator("td.address").inner_text()
        await row.get_by_role("link").click()
        await page.page.wait_for_selector(".bars li.chosen")
        answer = await page.text(".answer")
        assert answer.startswith(f"It went to {endpoint}, ")
        assert "The next best, " in answer
        await take_picture(page, folder / "console-decision.png")
        assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [browser.DESKTOP, browser.PHONE], ids=["desktop", "phone"])
async def test_pictures_of_both_views(demo, chromium, folder, tmp_path, size, scheme):
    """Overview and decision at both widths, light and dark, with live data: axe finds nothing serious."""
    async with chromium.page(demo.pages, size, scheme) as page:
        await page.open()
        await page.page.wait_for_selector("#last-decisions tbody tr")
        await page.until("document.querySelectorAll('path.line-a').length == 2")
        assert await page.violations() == []
        assert not await page.is_too_wide()
        kind = "phone" if size is browser.PHONE and scheme == "light" else f"{size[0]}-{scheme}"
        await take_picture(
            page, (folder if kind == "phone" else tmp_path) / f"console-overview-{kind}.png"
        )
        await page.page.locator("#last-decisions tbody a").first.click()
        await page.page.wait_for_selector(".answer")
        assert await page.violations() == []
        assert not await page.is_too_wide()
        await take_picture(
            page, (folder if kind == "phone" else tmp_path) / f"console-decision-{kind}.png"
        )
        assert page.complaints == []
