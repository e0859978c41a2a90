"""A headless Chromium through Playwright: open, click, take a screenshot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

NAMES = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = 8
"""Screenshots at most until two in a row are the same."""
_T = TypeVar("_T")


def find_chromium() -> str:
    """Return the path of the system's Chromium. Raises SystemExit, with a remedy, if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise SystemExit(f"this example needs a browser ({', '.join(NAMES)}), found none; run `make system-deps`")
    return path


_DRAWN = """async () => {
    const sheets = [...document.querySelectorAll('*')].flatMap(
        element => [...getComputedStyle(element).backgroundImage.matchAll(/url\\("(.+?)"\\)/g)].map(found => found[1]));
    const pictures = [...document.images, ...[...new Set(sheets)].map(url => Object.assign(new Image(), {src: url}))];
    await Promise.all(pictures.map(picture => picture.decode().catch(() => null)));
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""


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
            self._browser = self._playwright.chromium.launch(
                executable_path=chromium,
                args=["--disable-checker-imaging"],  # draws no picture before it is decoded
            )
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
        """Return the texts of the links to other pages of this site, each once."""
        script = "all => all.filter(a => a.host == location.host && a.pathname != location.pathname).map(a => a.innerText.trim())"
        texts = self._do(lambda: self._page.locator("a[href]").evaluate_all(script))
        return list(dict.fromkeys(filter(None, texts)))

    def click(self, link: str) -> None:
        """Click the first link with this text and wait for its page."""

        def click() -> None:
            previous_url = self._page.url
            self._page.get_by_role("link", name=link, exact=True).first.click()
            # A click returns before the browser has left the page.
            self._page.wait_for_url(lambda url: url != previous_url)

        self._do(click)

    def screenshot(self) -> bytes:
        """Return the viewport as PNG, once its pictures are decoded and two in a row are the same.

        A busy browser has loaded a page before it has drawn it. A page that never stands still is taken as it is.
        """

        def screenshot() -> bytes:
            self._page.evaluate(_DRAWN)
            newest = bytes(self._page.screenshot(animations="disabled"))
            for _ in range(SCREENSHOTS):
                previous, newest = newest, bytes(self._page.screenshot(animations="disabled"))
                if newest == previous:
                    break
            return newest

        return self._do(screenshot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._do(self._browser.close)
        self._do(self._playwright.stop)
        self._thread.shutdown()
