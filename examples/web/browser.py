"""A headless Chromium through Playwright: open, click, take a screenshot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

NAMES = ("chromium", "chromium-browser", "google-chrome")
_T = TypeVar("_T")


def find_chromium() -> str:
    """Path of the system's Chromium; SystemExit with a remedy where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise SystemExit(f"this example needs a browser ({', '.join(NAMES)}), found none; run `make system-deps`")
    return found


class Browser:
    """One page in one browser. Playwright's objects belong to the thread that made them, so they get one of their own.

    Args:
        width, height: of the viewport, in pixels; a screenshot has the same size.
    """

    def __init__(self, width: int, height: int) -> None:
        try:
            from playwright.sync_api import sync_playwright
        except ImportError:
            raise SystemExit("this example needs Playwright; run pip install 'ctxwin[web]'") from None
        self._size = {"width": width, "height": height}
        self._thread = ThreadPoolExecutor(1, "browser")
        try:
            self._do(self._start, sync_playwright, find_chromium())
        except BaseException:
            self._thread.shutdown()
            raise

    def _start(self, playwright: Callable[[], Any], chromium: str) -> None:
        self._playwright = playwright().start()
        try:
            self._browser = self._playwright.chromium.launch(executable_path=chromium)
            self._page = self._browser.new_page(viewport=self._size, device_scale_factor=1)
        except BaseException:
            self._playwright.stop()
            raise

    def _do(self, work: Callable[..., _T], *args: Any) -> _T:
        return self._thread.submit(work, *args).result()

    @property
    def url(self) -> str:
        return str(self._do(lambda: self._page.url))

    def open(self, url: str) -> None:
        from playwright.sync_api import Error

        try:
            self._do(lambda: self._page.goto(url))
        except Error as error:
            raise SystemExit(f"the page must open, got {error.message.splitlines()[0]}; check the address") from None

    def links(self) -> list[str]:
        """Texts of the links of this page that lead to another one of the same site, each once."""
        script = "all => all.filter(a => a.host == location.host && a.pathname != location.pathname).map(a => a.innerText.trim())"
        texts = self._do(lambda: self._page.locator("a[href]").evaluate_all(script))
        return list(dict.fromkeys(filter(None, texts)))

    def click(self, link: str) -> None:
        """Clicks the first link with this text and waits for the page behind it."""

        def click() -> None:
            before = self._page.url
            self._page.get_by_role("link", name=link, exact=True).first.click()
            self._page.wait_for_url(lambda now: now != before)  # a click returns before the browser has left the page

        self._do(click)

    def screenshot(self) -> bytes:
        """The viewport as PNG."""
        return bytes(self._do(lambda: self._page.screenshot()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._do(self._browser.close)
        self._do(self._playwright.stop)
        self._thread.shutdown()
