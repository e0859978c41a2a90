"""The page in headless Chromium: what it shows, on what screens, by keyboard, and with what nobody meant to show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ctxwin import Chunk, Window
from ctxwin.view import render, totals
from ctxwin.view.trace import Trace, read_trace
from view.recorded import DESK, PHONE, frame, watched
from window.fake import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

Open = Callable[..., "Page"]
HOSTILE = [
    "</script><img src=x onerror=alert(1)>", "<!--<script>", "\u2028'\"`${1}", "{{data}}{{script}}", "]]>&lt;b&gt;",
    "\x00\x1b[31m",
]  # fmt: skip
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


@pytest.fixture
def page(run: Path, open_page: Open) -> Page:
    return open_page(render(run, run.with_name("view.html")))


def names(step: Locator, strip: str) -> list[str]:
    return [text.strip() for text in step.locator(f"{strip} .name").all_text_contents()]


def step(page: Page, question: str) -> Locator:
    return page.locator(".step").filter(has=page.get_by_text(question, exact=True))


def test_every_step_shows_who_is_in_who_left_and_who_came_back(page: Page) -> None:
    assert names(step(page, "first?"), ".strip") == ["+ t=0 s", "+ t=1 s", "+ t=2 s"]
    second = step(page, "second?")
    assert names(second, ".strip:not(.gone)") == ["t=1 s", "t=2 s", "+ t=3 s"]
    assert names(second, ".gone") == ["× t=0 s"]
    third = step(page, "third?")
    assert names(third, ".strip") == ["↩ t=0 s", "t=1 s", "t=2 s", "t=3 s"]
    assert "back" in third.locator(".tile.back").inner_text()
    assert names(step(page, "fourth?"), ".strip") == ["t=1 s", "t=2 s", "↕ t=0 s", "t=3 s"]
    branch = step(page, "in the branch?")
    assert branch.locator(".window").inner_text() == "A.1"
    assert names(branch, ".strip:not(.gone)") == ["t=1 s", "t=0 s", "t=3 s"]
    assert names(branch, ".gone") == ["× t=2 s"]
    fifth = step(page, "fifth?")
    assert page.locator(".step .ops", has_text="adopt A.1").count() == 1
    assert fifth.locator(".ops").inner_text().startswith("toggle clean · pin")
    assert names(fifth, ".strip:not(.gone)")[:3] == ["t=1 s", "t=0 s", "○ t=3 s"]
    assert "remembered" in fifth.locator(".tile").nth(3).inner_text()
    assert "pinned" in fifth.locator(".tile").first.inner_text()
    tested = page.locator(".step").filter(has_text="matter for")
    assert "does “t=0 s” matter for “sixth?”?" in tested.inner_text()


def test_lanes_are_named_as_they_were_served(page: Page, run: Path) -> None:
    asks = {event["query"]: event for event in read_trace(run).events if event["op"] == "ask"}
    for question in ("first?", "second?", "third?", "fourth?", "in the branch?"):
        lanes = [placed["lane"] for placed in asks[question]["placed"]]
        shown = step(page, question).locator(".strip:not(.gone) .name + .words").all_text_contents()
        assert shown == lanes
    legend = page.locator("#legend")
    for lane in {placed["lane"] for ask in asks.values() for placed in ask["placed"] if "lane" in placed}:
        assert legend.locator(f"li[data-lane={lane}]").is_visible()
    assert not legend.locator("li[data-lane=orbit]").is_visible()


def test_every_edit_can_stand_apart(page: Page) -> None:
    page.get_by_label("every edit as a step of its own").check()
    assert "not asked" in page.locator(".step").first.inner_text()
    ops = page.locator(".step .ops").all_text_contents()
    assert ops[:5] == ["append", "append", "append", "append", "slide"]
    assert any(words.startswith("toggle clean · pin") for words in ops)
    page.get_by_label("every edit as a step of its own").uncheck()
    assert page.locator(".step .ops").first.text_content() == "append"


def test_costs_stand_beside_one_another(page: Page, run: Path) -> None:
    numbers = totals(read_trace(run))
    every = [event for event in read_trace(run).events if event["op"] == "ask"]
    asks = [event for event in every if "test" not in event]
    assert numbers["computed_tokens"] == sum(a["usage"]["computed_tokens"] for a in every) + 5
    assert numbers["tests"] == len(every) - len(asks) == 2
    assert numbers["right_others"] == {"re-prefill": 2}
    assert numbers["costs"] == {"prefix cache": {"tokens": 90, "asks": 2}, "trimming": {"tokens": 30, "asks": 1}}
    assert (numbers["known"], numbers["right"], numbers["asks"]) == (2, 1, len(asks))
    shown = page.locator("#totals").inner_text()
    for words in (
        f"questions asked\n{len(asks)}", "1 of 2 answered right; re-prefill: 2; 2 more asks tested what matters",
        f"{numbers['computed_tokens']}\n5 of them in idle time, {numbers['test_tokens']} of them to test what matters",
        f"prefix cache\n90\nknown for 2 of {len(asks)} questions only", f"vision encodes\n{numbers['vision_encodes']}",
    ):  # fmt: skip
        assert words in shown
    first, second = step(page, "first?"), step(page, "second?")
    assert "✓" in first.inner_text()
    assert "truth: something else" in second.inner_text()
    used = asks[1]["usage"]
    assert f"{used['computed_tokens']} of {used['prompt_tokens']} computed" in second.inner_text()
    second.click()
    details = page.locator("#details").inner_text()
    assert "5 more tokens were computed in idle time" in details
    assert "re-prefill: something else" in details
    assert page.locator("#overview .column").count() == len(asks)
    assert re.search(rf"ctxwin computed\s+{used['computed_tokens']}\s+prefix cache\s+50", details)


def test_the_keyboard_reaches_everything(page: Page) -> None:
    focus = "document.activeElement.id || document.activeElement.className"
    reached = []
    for _ in range(4):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focus))
    assert reached[:2] == ["apart", "head"]
    page.locator(".head[tabindex='0']").focus()
    title = page.locator("#details-title")
    last = page.locator(".step").count()
    for key, expected in (
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("End", last),
        ("ArrowRight", last),
        ("Home", 1),
    ):
        page.keyboard.press(key)
        assert title.inner_text().startswith(f"Step {expected} of {last}")
        assert page.locator(":focus").get_attribute("aria-current") == "step"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#said").text_content() == "follows t=1 s"
    assert page.locator(".tile.followed .name").all_text_contents().count("t=1 s") >= 4
    outline = page.locator(":focus").evaluate(
        "e => getComputedStyle(e).outlineStyle + getComputedStyle(e).outlineWidth"
    )
    assert outline == "solid3px"
    page.keyboard.press("Enter")
    assert page.evaluate(focus) == "details"
    page.keyboard.press("Escape")
    assert page.evaluate(focus) == "head"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    assert page.locator("#apart").is_checked()


def test_arrows_need_no_focus_first(page: Page) -> None:
    assert page.evaluate("document.activeElement === document.body")
    for key, expected in (("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        assert page.locator("#details-title").inner_text().startswith(f"Step {expected} of ")
        assert page.locator(":focus").get_attribute("aria-current") == "step"
        page.evaluate("document.activeElement.blur()")
    page.get_by_label("every edit as a step of its own").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#details-title").inner_text().startswith("Step 1 of ")


def test_a_recall_that_left_at_once_is_told(engine: FakeEngine, tmp_path: Path, open_page: Open) -> None:
    path = tmp_path / "run.jsonl"
    with watched(engine, path) as (_, window):
        ids = [window.append(frame(i)) for i in range(4)]
        window.slide(2)
        window.ask("first?", max_tokens=1)
        window.recall(ids[0])
        window.evict(ids[0])
        window.ask("second?", max_tokens=1)
    page = open_page(render(path, tmp_path / "view.html"))
    second = step(page, "second?")
    assert names(second, ".strip:not(.gone)") == ["t=2 s", "t=3 s"]
    assert names(second, ".gone") == ["× t=0 s"]
    assert "came back, left at once" in second.locator(".gone .tile").inner_text()
    assert "\n4 · 3 · 1" in "\n" + page.locator("#totals").inner_text()


def test_what_a_replay_places_again_did_not_come_back(engine: FakeEngine, tmp_path: Path, open_page: Open) -> None:
    path = tmp_path / "run.jsonl"
    with watched(engine, path) as (trace, window):
        window.append(frame(0))
        before = window.snapshot()
        window.ask("first?", max_tokens=1, remember=True)
        remembered = window.snapshot()
    for state in (before, remembered):  # as a node that runs again: from its beginning, with the same placements
        with Trace(path, append=True) as trace, Window.restore(engine, state) as again:
            trace.watch(again)
            again.ask("second?", max_tokens=1)
    page = open_page(render(path, tmp_path / "view.html"))
    last = page.locator(".step").last
    assert "placed again" in last.locator(".tile").last.inner_text()
    assert page.locator(".tile.back").count() == 0
    assert not page.locator("#legend li[data-mark=back]").is_visible()
    assert page.locator("#legend li[data-mark=again]").is_visible()


def test_a_click_selects_and_follows(page: Page) -> None:
    tile = step(page, "third?").locator(".tile.back")
    tile.click()
    assert "version 6" in page.locator("#details").inner_text()
    followed = page.locator(".tile.followed")
    assert followed.count() >= 4
    assert {text.lstrip("+×↩↕ ") for text in followed.locator(".name").all_text_contents()} == {"t=0 s"}
    tile.click()
    assert followed.count() == 0


@pytest.mark.parametrize("size", [PHONE, (800, 700), DESK])
def test_nothing_is_wider_than_the_screen(
    size: tuple[int, int], engine: FakeEngine, tmp_path: Path, open_page: Open
) -> None:
    with watched(engine, tmp_path / "run.jsonl", budget=4000) as (trace, window):
        window.append(Chunk.text("w" * 400))
        window.append(frame(1, text="long words and " + "x" * 90))
        window.ask("q" * 300, max_tokens=3)
        trace.note({"a" * 80: 70, "b": 30}, truth="y" * 200, text="z" * 300)
    page = open_page(render(tmp_path / "run.jsonl", tmp_path / "view.html"), size)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.locator(".step").first.locator(".head").click()
    assert page.locator("#details-title").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_on_a_phone_a_card_opens_and_closes(run: Path, open_page: Open) -> None:
    page = open_page(render(run, run.with_name("view.html")), PHONE)
    details = page.locator("#details")
    assert not details.is_visible()
    card = step(page, "third?")
    card.locator(".head").click()
    assert details.is_visible()
    assert card.locator("#details").count() == 1
    tops = [card.bounding_box() for card in page.locator(".step").all()]
    assert all(a and b and a["y"] + a["height"] <= b["y"] for a, b in pairwise(tops))
    card.locator(".head").click()
    assert not details.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE])
def test_text_stands_out_from_what_is_behind_it(size: tuple[int, int], scheme: str, run: Path, open_page: Open) -> None:
    page = open_page(render(run, run.with_name("view.html")), size, scheme)
    page.locator(".step .head").nth(1).click()
    found = page.evaluate(CONTRAST)
    assert len(found) > 100
    weak = [entry for entry in found if entry["ratio"] < 4.5]
    assert not weak
    backs = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (backs == "rgb(246, 247, 249)") == (scheme == "light")


def test_hostile_text_is_only_text(engine: FakeEngine, tmp_path: Path, open_page: Open) -> None:
    path = tmp_path / "{{data}}<b>.jsonl"
    with watched(engine, path, budget=4000) as (trace, window):
        for text in HOSTILE:
            window.append(Chunk.text(text, label=text))
            window.ask(text, max_tokens=1)
            trace.note({text: 3}, truth=text, text=text)
        window.fork(system_prompt=HOSTILE[0]).append(Chunk.text(HOSTILE[0]))
    out = render(path, tmp_path / "view.html")
    page = open_page(out)
    assert page.locator(".step").count() == len(HOSTILE) + 1
    assert page.locator("main img, main b b, #details script, #steps script").count() == 0
    page.locator(".step .head").first.click()
    assert page.locator(".question").text_content() == HOSTILE[0]
    assert HOSTILE[0] in page.locator(".ask .q").first.inner_text()
    assert page.title().startswith("{{data}}<b>.jsonl")


def test_a_thumbnail_that_is_no_picture_is_not_put_into_the_style(
    engine: FakeEngine, tmp_path: Path, open_page: Open
) -> None:
    path = tmp_path / "run.jsonl"
    with watched(engine, path) as (_, window):
        window.append(frame(0))
        window.ask("q", max_tokens=1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "chunk":
            line["thumbnail"] = 'x)} body{display:none} .y{background:url("https://example.org/'
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = open_page(render(path, tmp_path / "view.html"))
    assert page.locator("body").is_visible()
    assert page.locator(".step").count() == 1


def test_an_empty_trace_says_so(tmp_path: Path, open_page: Open) -> None:
    Trace(tmp_path / "run.jsonl").close()
    page = open_page(render(tmp_path / "run.jsonl", tmp_path / "view.html"))
    assert "Nothing was recorded yet" in page.locator("main").inner_text()
    assert not page.locator("#picture").is_visible()


def test_a_run_that_was_killed_shows_what_it_wrote(run: Path, open_page: Open) -> None:
    whole = run.read_bytes()
    lines = whole.splitlines(keepends=True)
    run.write_bytes(b"".join(lines[:10]) + lines[10][:40])
    page = open_page(render(run, run.with_name("view.html")))
    assert step(page, "first?").count() == 1
    assert step(page, "second?").count() == 0


def test_five_hundred_events_stay_small(engine: FakeEngine, tmp_path: Path, open_page: Open) -> None:
    path = tmp_path / "run.jsonl"
    with watched(engine, path) as (_, window):
        for i in range(167):
            window.append(frame(i))
            window.slide(max(0, len(window.ids) - 8))
            window.ask(f"q{i}?", max_tokens=1)
    assert len(read_trace(path).events) >= 490
    out = render(path, tmp_path / "view.html")
    assert out.stat().st_size < 2 << 20
    page = open_page(out)
    assert page.locator(".step").count() == 167
    page.locator(".head").first.focus()
    page.keyboard.press("End")
    assert page.locator("#details-title").inner_text().startswith("Step 167 of 167")


def test_only_the_newest_are_shown_where_there_are_too_many(
    engine: FakeEngine, tmp_path: Path, open_page: Open
) -> None:
    path = tmp_path / "run.jsonl"
    with watched(engine, path) as (_, window):
        for i in range(12):
            window.append(frame(i))
            window.slide(max(0, len(window.ids) - 2))
            window.ask(f"q{i}?", max_tokens=1)
    page = open_page(render(path, tmp_path / "view.html", limit=9))
    assert page.locator(".step").count() == 3
    assert names(page.locator(".step").last, ".strip:not(.gone)") == ["t=10 s", "+ t=11 s"]
    assert page.locator("#left-out").inner_text().startswith("27 earlier operations left out")
    assert "t=3 s" not in (tmp_path / "view.html").read_text()


def test_a_window_of_many_chunks_is_abridged(engine: FakeEngine, tmp_path: Path, open_page: Open) -> None:
    path = tmp_path / "run.jsonl"
    with watched(engine, path, budget=4000) as (_, window):
        window.extend([Chunk.text(f"page {i}") for i in range(40)])
        window.ask("a?", max_tokens=1)
        window.evict(window.ids[20])
        window.ask("b?", max_tokens=1)
    page = open_page(render(path, tmp_path / "view.html"))
    second = step(page, "b?")
    shown = second.locator(".strip:not(.gone) .tile").all_text_contents()
    assert len(shown) <= 16
    hidden = sum(int(re.findall(r"\d+", text)[0]) for text in shown if text.startswith("…"))
    assert hidden + sum(not text.startswith("…") for text in shown) == 39
    assert names(second, ".gone") == ["× page 20"]
    second.locator(".head").click()
    assert page.locator("#details tbody tr").count() == 40


def test_threads_of_windows_have_rows_of_their_own(engine: FakeEngine, tmp_path: Path, open_page: Open) -> None:
    path = tmp_path / "run.jsonl"
    with watched(engine, path) as (_, window):
        window.append(frame(0))
        window.ask("main?", max_tokens=1)
        one, two = window.fork(), window.fork()
        for branch, name in ((one, "one"), (two, "two"), (one, "one again")):
            branch.append(Chunk.text(name))
            branch.ask(f"{name}?", max_tokens=1)
        window.adopt(one)
        window.ask("after?", max_tokens=1)
    page = open_page(render(path, tmp_path / "view.html"))
    tops = {
        name: (step(page, f"{name}?").bounding_box() or {})["y"]
        for name in ("main", "one", "two", "one again", "after")
    }
    assert tops["main"] == tops["after"] < tops["one"] == tops["one again"] < tops["two"]
    assert page.locator("#lines .forks").count() == 2
    assert page.locator("#lines .adopts").count() == 1
    assert names(step(page, "two?"), ".strip") == ["t=0 s", "+ two"]


def late_branch(engine: FakeEngine, path: Path) -> Path:
    """A window of many steps, and a branch near its end."""
    with watched(engine, path) as (trace, window):
        for i in range(16):
            window.append(frame(i))
            if i >= 4:
                window.slide(1)
            window.ask(f"question {i}?", max_tokens=2)
            trace.note({"prefix cache": 50}, truth="x", answers={"re-prefill": "x"})
            if i == 13:
                with window.fork() as branch:
                    branch.ask("in the branch?", max_tokens=2)
    return path


def wait_until(page: Page, holds: Callable[[], bool]) -> None:
    """The page lays itself out in a later frame; its policy forbids playwright's own waiting, which evaluates text."""
    for _ in range(1200):
        if holds():
            return
        page.wait_for_timeout(50)
    pytest.fail("the page has not come to rest")


def test_a_late_branch_takes_no_room_before_it_is_in_sight(engine: FakeEngine, tmp_path: Path, open_page: Open) -> None:
    page = open_page(render(late_branch(engine, tmp_path / "run.jsonl"), tmp_path / "view.html"))

    def room() -> tuple[float, float]:
        """Height of the steps' area, and how far its scrolling goes."""
        return tuple(
            page.evaluate("(({clientHeight: a, scrollHeight: b}) => [a, b])(document.querySelector('#scroll'))")
        )

    first = page.locator(".step").first.bounding_box()
    before = room()
    assert first is not None and before[0] == before[1] and before[0] < first["height"] + 60
    branch = step(page, "in the branch?")
    page.locator("body").press("End")
    branch.scroll_into_view_if_needed()
    wait_until(page, lambda: room()[1] > 1.5 * before[1])
    box = branch.bounding_box()
    assert box is not None and box["height"] > 100
    page.evaluate("document.querySelector('#scroll').scrollLeft = 0")
    wait_until(page, lambda: room()[1] == before[1])


@pytest.mark.parametrize("size", [DESK, (1000, 900), PHONE])
def test_the_bars_of_the_summary_have_room(
    engine: FakeEngine, tmp_path: Path, open_page: Open, size: tuple[int, int]
) -> None:
    """The longest takes half of its card, whatever is said beside the others."""
    page = open_page(render(late_branch(engine, tmp_path / "run.jsonl"), tmp_path / "view.html"), size)
    longest = max(box["width"] for bar in page.locator(".lines.four .line").all() if (box := bar.bounding_box()))
    card = page.locator(".lines.four").bounding_box()
    assert card is not None and longest > (0.3 if size == PHONE else 0.5) * card["width"]
