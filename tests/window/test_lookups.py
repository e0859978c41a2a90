"""Answers that look things up on their way, held against the chat template's own rendering and a window filled by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ctxwin import Chunk, Library, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.errors import AnswerStopped, BudgetExceeded, UnsupportedModel
from ctxwin.store import open_store
from ctxwin.window import lookups
from ctxwin.window.answer import ToolCall
from engines.scripted import ScriptedEngine
from engines.tool_models import TOOL_ROLE, write_tool_model

OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
FACTS = {"pump": "The pump is oiled every 200 hours.", "valve": "The valve is red.", "lamp": "The lamp is dim."}


def called(query: str, library: str = "manuals", name: str = lookups.NAME) -> str:
    arguments = {"query": query, "library": library}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module", params=["hermes", "a turn of its own"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tools")
    made = write_tool_model(folder) if request.param == "hermes" else write_tool_model(folder, TOOL_ROLE)
    with open_engine(f"hf:{made}", dtype="float32") as opened:
        yield opened


@pytest.fixture
def shelf() -> Library:
    made = Library(open_store("memory:"), "manuals")
    for name, text in FACTS.items():
        made.add(text.encode(), f"{name}.txt")
    return made


def opened(engine: Engine, script: Sequence[str] | Callable[[str], str], budget: int = 3000) -> Window:
    window = Window(ScriptedEngine(engine, script), "You read logs.", budget)
    window.extend([Chunk.text(f"Line {i} of the log. ") for i in range(3)])
    return window


def scripted(window: Window) -> Any:
    return window.engine


def test_the_second_prompt_is_what_the_template_renders(engine: Engine, shelf: Library) -> None:
    call = called("how often is the pump oiled")
    with opened(engine, [call, "Every 200 hours."]) as window:
        before = window.ids
        made = window.ask("How often is it oiled?", 300, libraries=[shelf])
        assert made.text == "Every 200 hours." and made.tool_calls == () and window.ids == before
        (done,) = made.looked_up
        assert (done.library, done.query) == ("manuals", "how often is the pump oiled") and done.left_out == 0
        assert scripted(window).decode(made.token_ids) == call + "Every 200 hours."
        found = shelf.view().find("how often is the pump oiled", lookups.HITS, engine)
        assert len(done.labels) == len(found) >= 1 and FACTS["pump"] in scripted(window).prompts[1]
        result = "".join(part.text for chunk in found for part in chunk.parts)  # type: ignore[union-attr]
        asked = {"name": lookups.NAME, "arguments": json.loads(call.split("\n")[1])["arguments"]}
        messages = [
            {"role": "system", "content": "You read logs."},
            {
                "role": "user",
                "content": "Line 0 of the log. Line 1 of the log. Line 2 of the log. How often is it oiled?",
            },
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": asked}]},
            {"role": "tool", "content": result},
        ]
        tokenizer = engine.encoder.checkpoint.tokenizer  # type: ignore[attr-defined]
        wanted = tokenizer.apply_chat_template(
            messages, tools=[lookups.tool([shelf])], tokenize=False, add_generation_prompt=True
        )
        assert "".join(scripted(window).prompts[1].split()) == "".join(wanted.split())


def test_question_and_answer_so_far_are_not_computed_again(
    engine: Engine, shelf: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own words, the first of which are taken for a call."""
    call, read = ToolCall(lookups.NAME, {"query": "pump"}, "1"), lookups.LookUps._calls
    monkeypatch.setattr(lookups.LookUps, "_calls", lambda self, text: [call] if not self._views else read(self, text))
    with Window(engine, "You read the log of a pump.", 3000) as window:
        window.extend([Chunk.text(f"Line {i} of the log. ") for i in range(3)])
        window.ask(
            "Warm?", 2, tools=[lookups.tool([shelf])]
        )  # the branch is conditioned behind the tools' system prompt
        question = "How often is the pump oiled?"
        said = window.ask(question, 8, tools=[lookups.tool([shelf])]).token_ids
        assert said[6] not in said[:6]
        made = window.ask(question, 30, libraries=[shelf], stop=said[6])
        template = engine.template
        assert template is not None and len(made.looked_up) == 1 and made.usage.exact
        query = engine.encode_query("How often is the pump oiled?").tokens
        found = sum(engine.encode(c).tokens for c in shelf.view().find("pump", lookups.HITS, engine))
        tail = engine.encode_query(template.tool_turn().tail).tokens
        opening = len(engine.template_ids(template.tool_turn().opening))
        spare = 2  # the last token of an answer, whose KV nobody has computed when it ends
        assert query + opening + found + tail <= made.usage.computed_tokens <= query + opening + found + tail + spare
        assert made.usage.answer_tokens == len(made.token_ids) <= 30
        cut = window.ask(question, 4, libraries=[shelf])
        assert len(cut.token_ids) == 4 and cut.looked_up == ()


def test_what_is_remembered_stays_and_its_library_keeps_its_version(engine: Engine, shelf: Library) -> None:
    said = [called("pump"), "Every 200 hours.", called("pump"), "Still."]
    with opened(engine, said) as window:
        before = window.ids
        made = window.ask("How often?", 300, libraries=[shelf], remember=True)
        assert window.ids[: len(before)] == before and window.ids[-1] == made.remembered
        assert window.core.state.libraries == {"manuals": shelf.view().version}
        shelf.add(b"The pump is never oiled.", "pump.txt", replace=True)
        again = window.ask("And now?", 300, libraries=[shelf])
        shown = scripted(window).prompts[-1]
        assert "never" not in shown and shown.count(FACTS["pump"]) == 1, "what is placed already is not placed again"
        assert "shown above already" in shown and again.looked_up == made.looked_up
        window.evict(made.remembered or "")
        window.check()


def test_what_else_is_called_is_the_callers_to_do(engine: Engine, shelf: Library) -> None:
    with opened(
        engine, [called("x") + "\n" + called("y", name="other"), called("pump") + called("valve"), "Both."]
    ) as w:
        made = w.ask("?", 300, libraries=[shelf], tools=[OTHER])
        assert [c.name for c in made.tool_calls] == [lookups.NAME, "other"] and made.looked_up == ()
        both = w.ask("?", 300, libraries=[shelf], tools=[OTHER])
        assert [done.query for done in both.looked_up] == ["pump", "valve"] and both.text == "Both."
        assert FACTS["pump"] in scripted(w).prompts[-1] and FACTS["valve"] in scripted(w).prompts[-1]


def test_a_bad_call_is_told_to_the_model(engine: Engine, shelf: Library) -> None:
    with opened(engine, [called("pump", "nowhere"), called("  "), called("zzzz"), "Pity."]) as window:
        made = window.ask("?", 300, libraries=[shelf])
        assert made.text == "Pity." and [done.labels for done in made.looked_up] == [(), (), ()]
        assert scripted(window).prompts[-1].count("must have a query and a library out of manuals") == 2
        assert "Nothing was found." in scripted(window).prompts[-1]


def test_it_ends_after_a_few_look_ups(engine: Engine, shelf: Library) -> None:
    with opened(engine, lambda prompt: called("pump")) as window:
        made = window.ask("?", 2000, libraries=[shelf])
        assert len(made.looked_up) == lookups.MOST and [c.name for c in made.tool_calls] == [lookups.NAME]
        assert len(window.ids) == 3
        window.check()


def test_what_has_no_room_is_left_out(engine: Engine, shelf: Library) -> None:
    from ctxwin.window.toolcalls import template_of

    system = template_of(engine).system("You read logs.", [lookups.tool([shelf])])
    call = called("pump valve lamp")
    used = engine.encode_system_prompt(system).tokens + engine.encode_query("?").tokens + len(engine.text_ids(call))
    left_out: list[int | None] = []
    for spare in (-60, -20, 0, 20, 40, 400):
        room = used + 3 * engine.encode(Chunk.text("Line 0 of the log. ")).tokens + 140 + spare
        with opened(engine, [call, "Little."], room) as window:
            try:
                (done,) = window.ask("?", len(engine.text_ids(call)) + 100, libraries=[shelf]).looked_up
            except BudgetExceeded as error:
                assert "lower max_tokens" in str(error)
                left_out.append(None)
                continue
            assert len(done.labels) + done.left_out == len(shelf.search("pump valve lamp", lookups.HITS)) == 3
            assert ("There is no room" in scripted(window).prompts[-1]) == (not done.labels)
            left_out.append(done.left_out)
    assert left_out[0] is None and left_out[-1] == 0 and {1, 2} & set(left_out)


def test_a_stream_shows_the_text_and_no_calls(engine: Engine, shelf: Library) -> None:
    said = ["I look. " + called("pump"), "Every 200 hours."]
    with opened(engine, said * 2) as window:
        stream = window.stream("?", 300, libraries=[shelf])
        text = "".join(stream)
        assert stream.answer is not None and text == stream.answer.text == "I look.Every 200 hours."
        heard: list[str] = []
        from ctxwin.window.ask import Question

        question = Question.of("?", 300, libraries=[shelf])
        with pytest.raises(AnswerStopped):
            window.answer(
                question, on_token=lambda _, text: bool(heard.append(text) or True), stopped=lambda: bool(heard)
            )
        assert len(window.ids) == 3
        window.check()


def test_who_listens_may_end_it(engine: Engine, shelf: Library) -> None:
    from ctxwin.window.ask import Question

    with opened(engine, [called("pump"), "Every."]) as window:
        made = window.answer(Question.of("?", 300, libraries=[shelf]), on_token=lambda *_: False)
        assert made.looked_up == () and len(made.token_ids) == 1


def test_several_answers_look_up_for_themselves(engine: Engine, shelf: Library) -> None:
    with opened(engine, lambda prompt: "Every." if FACTS["pump"] in prompt else called("pump")) as window:
        made = window.ask("?", 300, libraries=[shelf], n=2)
        assert made.text == "Every." and [len(one.looked_up) for one in (made, *made.others)] == [1, 1]


def test_two_libraries_of_one_name_and_a_template_without_tools(engine: Engine, shelf: Library, tmp_path: Path) -> None:
    from engines.models import write_text_model

    with opened(engine, ["x"]) as window, pytest.raises(ValueError, match="different names"):
        window.ask("?", libraries=[shelf, Library(open_store("memory:"), "manuals")])
    with open_engine(f"hf:{write_text_model(tmp_path)}") as plain, Window(plain, "x") as other:
        with pytest.raises(UnsupportedModel) as refused:
            other.ask("?", libraries=[shelf])
        assert refused.match("tool")
