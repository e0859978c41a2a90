from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import system
from view.recorded import DESK, everything_once
from window.fake import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


# While Playwright is open, an event loop runs in this thread, and no other one may: it is closed with the module.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with system.chromium() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page at a size and colour scheme. What it prints, throws or fetches from elsewhere fails the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def opened(url: str | Path, size: tuple[int, int] = DESK, scheme: Any = "light") -> Page:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        address = url.resolve().as_uri() if isinstance(url, Path) else url

        def requested(request: Any) -> None:
            if not request.url.startswith((address, "data:")):
                complaints.append(f"a request to {request.url}")

        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", requested)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture
def run(engine: FakeEngine, tmp_path: Path) -> Path:
    everything_once(engine, tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"
