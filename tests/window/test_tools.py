"""Questions that offer tools, held against a window that was opened with them; several answers at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.errors import BudgetExceeded, ReadOnlyWindow, UnsupportedModel
from engines.scripted import ScriptedEngine
from engines.tool_models import write_tool_model
from window.fake import FakeEngine

LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {"at": {}}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with open_engine(f"hf:{write_tool_model(tmp_path_factory.mktemp('tools'))}", dtype="float32") as opened:
        yield opened


def fill(window: Window, count: int = 4) -> list[str]:
    return window.extend([Chunk.text(f"Line {i} of the log. ") for i in range(count)])


def test_it_answers_as_a_window_opened_with_the_tools_after_every_edit(engine: Engine) -> None:
    template = engine.template
    assert template is not None
    with Window(engine, "You read logs.") as window:
        ids = fill(window)
        for edit in (
            lambda: None,
            lambda: window.evict(ids[1]),
            lambda: window.append(Chunk.text("More. ")),
            lambda: window.recall(ids[1]),
            lambda: window.reorder([*window.ids[::-1]]),
            lambda: window.toggle(ids[2], conditioned=False),
        ):
            edit()
            with Window(engine, template.system("You read logs.", [LOOK])) as fresh:
                for placed in window.core.state.placed:
                    new = fresh.append(placed.chunk)
                    fresh.toggle(new, conditioned=placed.conditioned)
                wanted = fresh.ask("What is wrong?", 8, logprobs=5)
            made = window.ask("What is wrong?", 8, tools=[LOOK], logprobs=5)
            assert made.token_ids == wanted.token_ids, edit
            assert made.first_token_logprobs == pytest.approx(wanted.first_token_logprobs, abs=1e-4)
            assert made.usage.prompt_tokens == wanted.usage.prompt_tokens
            assert window.ask("What is wrong?", 8).usage.prompt_tokens < made.usage.prompt_tokens


def test_only_the_first_question_with_other_tools_conditions_the_chunks(engine: Engine) -> None:
    with Window(engine, "You read the log of a day.") as window:
        fill(window)
        first = window.ask("What is wrong?", 4, tools=[LOOK]).usage
        again = window.ask("What else?", 4, tools=[LOOK["function"]]).usage  # type: ignore[list-item]
        assert again.computed_tokens == again.prompt_tokens - window_tokens(window, first.prompt_tokens)
        assert again.computed_tokens < first.computed_tokens / 2
        window.append(Chunk.text("A new line. "))
        third = window.ask("What else?", 4, tools=[LOOK]).usage
        assert third.computed_tokens < first.computed_tokens / 2


def window_tokens(window: Window, prompt: int) -> int:
    return prompt - window.engine.encode_query("What is wrong?").tokens


def test_calls_are_read_out_of_the_answer(engine: Engine) -> None:
    said = ["I look.\n" + CALL, CALL + "\n<tool_call>{nothing}</tool_call>", "Nothing."]
    scripted = ScriptedEngine(engine, said)
    with Window(scripted, "You read logs.") as window:
        fill(window)
        one = window.ask("Where?", 200, tools=[LOOK])
        assert one.text == "I look." and [(c.name, c.arguments) for c in one.tool_calls] == [("look", {"at": 3})]
        assert scripted.decode(one.token_ids) == said[0] and json.dumps(LOOK["function"]) in scripted.prompts[0]
        stream = window.stream("Where?", 200, tools=[LOOK])
        assert "".join(stream) == "" and stream.answer is not None, "calls are no text"
        assert len(stream.answer.tool_calls) == 1 and "must be JSON" in stream.answer.broken_calls[0].error
        before = window.ids
        three = window.ask("Where?", 200, tools=[LOOK], remember=True)
        assert three.text == "Nothing." and window.ids == (*before, three.remembered)


def test_what_cannot_be_offered_is_refused_and_changes_nothing(engine: Engine) -> None:
    with Window(engine, "You read logs.") as window:
        ids = fill(window)
        for bad in ({"name": ""}, {"type": "other"}, "look", {"type": "function", "function": {}}):
            with pytest.raises(ValueError, match="tools must be like"):
                window.ask("Where?", tools=[bad])  # type: ignore[list-item]
        assert list(window.ids) == ids and window.ask("Where?", 4).text is not None
        template = engine.template
        assert template is not None
        shown = engine.encode_system_prompt(template.system("You read logs.", [LOOK])).tokens
        more = shown - engine.encode_system_prompt("You read logs.").tokens
        for budget, message in ((shown + 9, "slide()"), (shown - 9, "budget must exceed")):
            with (
                Window(engine, "You read logs.", budget) as small,
                pytest.raises(BudgetExceeded, match=re.escape(message)) as caught,
            ):
                small.ask("Where?", tools=[LOOK])
            assert f"; {more} tokens show the tools" in str(caught.value)
    with pytest.raises(ReadOnlyWindow):
        window.ask("Where?", tools=[LOOK])
    with Window(FakeEngine(), "x") as plain, pytest.raises(UnsupportedModel, match="no chat template"):
        plain.ask("Where?", tools=[LOOK])


def test_a_closed_window_gives_back_what_its_branch_held(engine: Engine) -> None:
    repo: Any = engine.repo
    with Window(engine, "You read other logs.") as window:
        fill(window)
        window.ask("Where?", 4, tools=[LOOK])
        spans = [p.kv.span for p in window._tool_branch._branch.core.state.placed if p.kv]  # type: ignore[union-attr]
        assert spans and all(repo.leased(span) for span in spans)
    assert not any(repo.leased(span) for span in spans)


def test_what_is_forgotten_leaves_nothing_in_the_branch(tmp_path: Path) -> None:
    with (
        open_engine(f"hf:{write_tool_model(tmp_path)}", dtype="float32") as engine,
        Window(engine, "You read logs.", fidelity=Fidelity("patched")) as window,
    ):
        first, *others = fill(window, 3)
        window.ask("What?", 4, tools=[LOOK])
        window.evict(first, forget=True)
        window.ask("What?", 4, tools=[LOOK])
        chunks = window._tool_branch._branch.chunks  # type: ignore[union-attr]
        assert [(chunk.exact, chunk.evicted_antecedents) for chunk in chunks] == [(True, ())] * 2
        for other in others:
            window.evict(other, forget=True)
        spans = [key for key in engine.store.list() if key.startswith("span/")]
        assert len(spans) <= 2  # of the system prompts, with tools and without


def test_the_branch_follows_another_system_prompt_and_edits_that_are_taken_back(engine: Engine) -> None:
    def assert_as_opened_anew(window: Window) -> None:
        with Window(engine, window.system_prompt) as fresh:
            for placed in window.core.state.placed:
                fresh.append(placed.chunk)
            wanted = fresh.ask("What is wrong?", 8, tools=[LOOK], logprobs=5)
        made = window.ask("What is wrong?", 8, tools=[LOOK], logprobs=5)
        assert made.usage.prompt_tokens == wanted.usage.prompt_tokens and made.token_ids == wanted.token_ids

    with Window(engine, "You read logs.") as window:
        first, second, _ = fill(window, 3)
        assert_as_opened_anew(window)
        window.adopt(window.fork("You are a very different assistant that reads no logs."))
        assert_as_opened_anew(window)
        window.undo()
        assert_as_opened_anew(window)
        window.evict(second, lazy=True)
        with window.fork("You read.") as branch:  # its branch is opened while the edit waits
            assert_as_opened_anew(branch)
            branch.recall(second)
            branch.evict(first)
            assert_as_opened_anew(branch)


def test_several_answers_are_those_of_their_seeds(engine: Engine) -> None:
    with Window(engine, "You read logs.") as window:
        fill(window)
        one = window.ask("What is wrong?", 8, temperature=1.0, seed=5, n=3, remember=True)
        assert len(one.others) == 2 and window.ids[-1] == one.remembered and len(window.ids) == 5
        window.evict(str(one.remembered))
        each = [window.ask("What is wrong?", 8, temperature=1.0, seed=5 + i).token_ids for i in range(3)]
        assert each == [a.token_ids for a in (one, *one.others)] and len(set(each)) == 3
        with pytest.raises(ValueError, match=r"n must be an int in 1\.\."):
            window.ask("What is wrong?", n=0)
