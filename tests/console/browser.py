"""A real Chromium, and pages whose console and requests are watched."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from importlib import resources

from tests.support import programs

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

#: Width and height of a desk's and of a phone's window.
DESKTOP, PHONE = (1280, 860), (390, 844)

#: Longest wait for something on a page (ms); machines may be busy.
_TIMEOUT_MS = 300_000


def need() -> str:
    """Path of Chromium; skips, or fails where it is required."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    raise programs.missing("needs a browser: apt-get install chromium", "EXTPROC_REQUIRE_CHROMIUM")


class WatchedPage:
    """A page, and what it should not have.

    Attributes:
        page: The page of Playwright.
        complaints: Messages of the browser's console, exceptions and requests to elsewhere.
    """

    def __init__(self, page, base):
        self.page = page
        self.base = base
        self.complaints = []
        page.set_default_timeout(_TIMEOUT_MS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("request", self._on_request)

    def _on_console(self, message):
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text}")

    def _on_request(self, request):
        if not request.url.startswith(self.base):
            self.complaints.append(f"request to {request.url}")

    async def open(self, view=""):
        """Open a view, and wait for its first data."""
        await self.page.goto(f"{self.base}/console/{view}")
        await self.page.wait_for_selector("#state[data-state]")

    async def text(self, selector):
        """The text of the first element, as a reader sees it."""
        return await self.page.locator(selector).first.inner_text()

    async def until(self, expression):
        """Wait until a JavaScript expression is true.

        Playwright's own wait evaluates text within the page, which the policy of the page forbids.
        """
        async with asyncio.timeout(_TIMEOUT_MS / 1e3):
            while not await self.page.evaluate(expression):
                await asyncio.sleep(0.1)

    async def violations(self):
        """Serious findings of axe on the page as it is, one line each."""
        source = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
        await self.page.evaluate(source)
        result = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{finding['id']}: {node['html'][:200]}"
            for finding in result["violations"]
            if finding["impact"] in {"serious", "critical"}
            for node in finding["nodes"]
        ]

    async def is_too_wide(self):
        """True if the page scrolls sideways."""
        return await self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        )


class Chromium:
    """A running browser."""

    def __init__(self, browser):
        self._browser = browser

    @contextlib.asynccontextmanager
    async def page(self, port, size=DESKTOP, scheme="light"):
        """Open an empty page for the picker on a port of this machine, with a profile of its own."""
        width, height = size
        context = await self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        try:
            yield WatchedPage(await context.new_page(), f"http://127.0.0.1:{port}")
        finally:
            await context.close()


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Chromium]:
    """Start a browser."""
    path = need()
    from playwright.async_api import async_playwright  # noqa: PLC0415 - only where there is a browser

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield Chromium(browser)
        finally:
            await browser.close()
