"""Volatile system prompts without an engine: what is served of a history, held against a model of its lines."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import jinja2
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from adapters.chats.changing_prompts import DIALECTS, body, clocked, lines_of, system_of, user, words
from ctxwin_chats.lazy_drops import Bounds, LazyDrops
from ctxwin_chats.options import PromptOptions, read_options
from ctxwin_chats.records import PER_NAME
from ctxwin_chats.volatile import SETTLED, SHORT, Late, VolatilePrompts, put, takes_late_system


def is_subsequence(some: list[str], of: list[str]) -> bool:
    rest = iter(of)
    return all(one in rest for one in some)


class Prompts(RuleBasedStateMachine):
    """One conversation, whose client changes, adds, drops, repeats and swaps lines of its system prompt."""

    @initialize(dialect=st.sampled_from(DIALECTS), gap=st.sampled_from(["\n", " ", "\n\n", "  ", "\n  "]))
    def begin(self, dialect: str, gap: str) -> None:
        self.prompts = VolatilePrompts(4, 1e9)
        self.dialect, self.gap = dialect, gap
        self.lines = [f"Rule {i}." for i in range(5)]
        self.turns = [user("begin")]
        self.frame: list[str] | None = None
        self.ages: dict[str, int] = {}
        self.served = ""
        self.next = 5

    @rule(at=st.integers(0, 7), times=st.integers(1, 3), again=st.sampled_from([0, 1, SETTLED]))
    def tick(self, at: int, times: int, again: int) -> None:
        """A clock, or an entry of a list, that is another one in some requests and then stays."""
        at = 1 + at % len(self.lines)
        self.lines.insert(at, "It is early.")
        for i in range(times + again):
            if i < times:
                self.lines[at] = self.new()
            self.ask()

    @rule(at=st.integers(0, 7), repeated=st.booleans())
    def add(self, at: int, repeated: bool) -> None:
        line = self.lines[at % len(self.lines)] if repeated else self.new()
        self.lines.insert(1 + at % len(self.lines), line)

    @rule(at=st.integers(0, 7))
    def drop(self, at: int) -> None:
        if len(self.lines) > 2:
            del self.lines[1 + at % (len(self.lines) - 1)]

    @rule(at=st.integers(0, 7))
    def swap(self, at: int) -> None:
        if len(self.lines) > 2:
            at = 1 + at % (len(self.lines) - 2)
            self.lines[at], self.lines[at + 1] = self.lines[at + 1], self.lines[at]

    def new(self) -> str:
        self.next += 1
        return f"Rule {self.next}."

    @rule(turns=st.integers(1, 3))
    def ask(self, turns: int = 1) -> None:
        for _ in range(turns):
            sent = body(self.dialect, self.lines, self.gap, self.turns)
            served = copy.deepcopy(sent)
            late = self.prompts.take(served, "n", words)
            standing = self.frame is not None and is_subsequence(self.frame, self.lines)
            system = system_of(self.dialect, served)
            stable, moved = lines_of(system), late.text.splitlines()
            if self.frame is None:
                assert stable == self.lines
            elif standing:
                assert stable == self.frame
                # Two texts are cut elsewhere as they grow, which is the client's doing.
                assert self.dialect in ("parts", "turns", "blocks") or system.rstrip() == self.served
            else:
                settled = {line for line, age in self.ages.items() if age >= SETTLED}.union(self.frame)
                assert stable == [line for line in self.lines if line in settled]
            moved = [line.strip() for line in moved]
            assert Counter(stable) + Counter(moved) == Counter(self.lines) and is_subsequence(moved, self.lines)
            assert (late.parts, late.tokens) == (len(moved), words(late.text))
            self.check_rest(sent, served, late)
            self.frame, self.served = stable, system.rstrip()
            self.ages = {line: self.ages.get(line, 0) + 1 for line in moved}
            self.turns = [user("begin"), {"role": "assistant", "content": "ok"}, user(f"and {self.next}")]

    def check_rest(self, sent: dict[str, Any], served: dict[str, Any], late: Late) -> None:
        """All but the system prompt is as sent, with what is late behind it."""
        if not late.parts:
            assert served == sent
            return
        with_system, in_turn = copy.deepcopy(served), copy.deepcopy(served)
        put(with_system, late.text, as_system=True)
        put(in_turn, late.text, as_system=False)
        name = "input" if "input" in sent else "messages"
        turns = [user(sent[name])] if isinstance(sent[name], str) else self.turns
        end = with_system[name]
        assert end[-1 - len(turns) :] == [*turns[:-1], {"role": "system", "content": late.text}, turns[-1]]
        end = in_turn[name]
        assert end[-1]["content"] == f"<system>\n{late.text}\n</system>\n\n{turns[-1]['content']}"
        assert end[-len(turns) : -1] == turns[:-1]
        assert len(end) == len(with_system[name]) - 1
        other = {"system", "instructions", name}
        assert {k: v for k, v in served.items() if k not in other} == {k: v for k, v in sent.items() if k not in other}


TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def late_of(prompts: VolatilePrompts, data: dict[str, Any], name: str = "") -> str:
    return prompts.take(copy.deepcopy(data), name, words).text


def test_conversations_are_known_by_name_or_by_their_first_turn() -> None:
    prompts = VolatilePrompts(16, 1e9)
    for name, first in (("n", "hi"), ("", "hi"), ("", "ho"), ("m", "hi")):
        assert late_of(prompts, clocked(1, user(first), cache_salt=name + first), name) == ""
        assert late_of(prompts, clocked(2, user(first), cache_salt=name + first), name) == "It is 2."
    assert late_of(prompts, clocked(3, user("slid"), cache_salt="nhi"), "n") == "It is 3."
    assert late_of(prompts, clocked(3, cache_salt="other"), "n") == ""
    assert late_of(VolatilePrompts(16, 1e9), clocked(3, cache_salt="nhi"), "n") == ""  # of another tenant


def test_a_conversation_begins_with_what_others_have_shown_to_move() -> None:
    prompts = VolatilePrompts(16, 1e9)

    def late(time: int, name: str, rules: str = "You watch a door, and say who comes.", **fields: Any) -> str:
        return late_of(prompts, clocked(time, user(name), rules=rules, **fields), name)

    assert late(1, "n") == late(2, "m") == "", "nothing has moved yet"
    assert late(3, "n") == "It is 3."
    assert late(4, "o") == "It is 4."
    assert late(4, "o", model="other") == ""
    assert late(4, "p", "Go on.\nYou watch a door, and say who comes.") == "", (
        "in front of the frame, where nothing moved"
    )
    assert late(4, "q", "You watch a door, and say who comes.\nGo on.") == "Go on.\nIt is 4.", "where the clock stands"
    assert late(4, "r", "You watch a door, and say who comes.\n" + "Much more. " * 9) == "", "most of it"


def test_another_system_prompt_of_a_name_has_a_frame_of_its_own() -> None:
    prompts, shared = VolatilePrompts(16, 1e9), "Be brief."
    planner = f"{shared}\n" + "\n".join(f"Plan {i} well." for i in range(100))
    coder = f"{shared}\n" + "\n".join(f"Code {i} well." for i in range(100))
    for time in range(3):
        for rules in (planner, coder):
            assert late_of(prompts, clocked(time, rules=rules), "n") == (f"It is {time}." if time else "")


def test_a_prompt_of_which_most_changes_is_served_as_sent() -> None:
    prompts, much = VolatilePrompts(16, 1e9), "x" * SHORT
    for first, memory, is_late in (
        ("hi", "", False),
        ("hi", much, False),
        ("hi", "short", True),
        ("slid", "short", False),
    ):
        data = clocked(1, user(first), rules=f"Watch.\nMemory of {first}: {memory}")
        assert bool(late_of(prompts, data, "n")) == is_late


def test_requests_that_are_served_as_sent() -> None:
    prompts = VolatilePrompts(16, 1e9)
    rules = {"role": "system", "content": "x"}
    many = "\n".join(f"line {i}" for i in range(5000))
    for fields in (
        {"previous_response_id": "r"}, {"truncate_prompt_tokens": 5}, {"messages": [rules]}, {"messages": None},
        {"messages": [rules, {"role": "assistant", "content": "hello"}]}, {"messages": [{"role": "system"}, user("hi")]},
        {"messages": [{"role": "system", "content": many}, user("hi")]}, {"messages": ["x", 3]},
        {"messages": [rules, {"role": "user", "content": 3}]},
    ):  # fmt: skip
        for time in range(2):
            data = {**clocked(time), **fields}
            untouched = copy.deepcopy(data)
            assert prompts.take(data, "n", words) == Late() and data == untouched
    assert len(prompts) == 0


def test_what_vllm_takes_out_of_a_system_prompt_is_left_to_it() -> None:
    prompts = VolatilePrompts(16, 1e9)
    for time in range(3):
        blocks = [f"x-anthropic-billing-header: {time};", f"You watch.\nIt is {time}.", f"At {time}."]
        system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in blocks]
        data = {"system": system, "messages": [user("hi")]}
        late = prompts.take(data, "n", words)
        kept = [block["text"] for block in data["system"]]
        assert kept == ([blocks[0], "You watch.\n"] if time else blocks)
        assert late.text == (f"It is {time}.\nAt {time}." if time else "")


TAGGED = "<system>\nIt is 3.\n</system>"


def part(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def places() -> dict[str, tuple[str, list[Any], list[Any], list[Any]]]:
    """The end of a history, the same with a late system message, and with a late text."""
    late, picture = {"role": "system", "content": "It is 3."}, {"type": "image_url", "image_url": {"url": "data:x"}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    tool, started = {"role": "tool", "content": "seen"}, {"role": "assistant", "content": "It"}
    of_tool = {"type": "tool_result", "tool_use_id": "c", "content": "seen"}
    shown = [part("step 3"), picture, part("What?")]
    output = {"type": "function_call_output", "call_id": "c", "output": [part("seen", "input_text")]}

    def users(*contents: Any) -> list[Any]:
        return [{"role": "user", "content": content} for content in contents]

    return {
        "a text": ("messages", users("What?"), [late, *users("What?")], users(f"{TAGGED}\n\nWhat?")),
        "one part": ("messages", users(shown[2:]), [late, *users(shown[2:])], users([part(TAGGED + "\n"), *shown[2:]])),
        "a question behind a picture": (
            "messages", users(shown), [*users(shown[:2]), late, *users(shown[2:])],
            users([*shown[:2], part(TAGGED + "\n"), shown[2]]),
        ),
        "a picture": ("messages", users([picture]), [*users([picture]), late], users([picture, part(TAGGED + "\n")])),
        "a result": ("messages", [call, tool], [call, tool, late], [call, {**tool, "content": f"seen\n\n{TAGGED}"}]),
        "a result of a block": ("messages", users([of_tool]), [*users([of_tool]), late], users([of_tool, part(TAGGED + "\n")])),
        "a result behind a text": (
            "messages", users([shown[0], of_tool]), [*users([shown[0], of_tool]), late],
            users([shown[0], of_tool, part(TAGGED + "\n")]),
        ),
        "an output": (
            "input", [output], [output, late], [{**output, "output": [*output["output"], part(TAGGED + "\n", "input_text")]}],
        ),
        "an answer that goes on": (
            "messages", [*users("What?"), started], [late, *users("What?"), started], [*users(f"{TAGGED}\n\nWhat?"), started],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("which", places())
def test_late_stands_in_front_of_the_question_or_behind_a_result(which: str) -> None:
    name, sent, with_system, in_turn = places()[which]
    for as_system, wanted in ((True, with_system), (False, in_turn)):
        data = {name: copy.deepcopy(sent)}
        put(data, "It is 3.", as_system=as_system)
        assert data[name] == wanted


def test_lazy_drops_work_behind_a_clock() -> None:
    prompts, drops, bounds, kept = VolatilePrompts(4, 1e9), LazyDrops(4, 1e9), Bounds(), []
    turns = [turn for i in range(9) for turn in (user(f"step {i}"), {"role": "assistant", "content": "ok"})]
    for time in range(1, 6):
        data = clocked(time, *turns[2 * max(0, time - 3) : 2 * time + 1])
        late = prompts.take(data, "n", words)
        kept.append(drops.serve(data, "n", bounds, words, 10**6).parts)
        if late.parts:
            put(data, late.text, as_system=False)
        served = [*turns[: 2 * time], user(f"<system>\nIt is {time}.\n</system>\n\nstep {time}")]
        assert time == 1 or data["messages"] == [{"role": "system", "content": "You watch.\n"}, *served]
    assert kept == [0, 0, 0, 2, 4]


def test_the_memory_is_bounded() -> None:
    prompts = VolatilePrompts(16, 1e9)
    for i in range(30):
        late_of(prompts, clocked(0, rules=f"Rules {i}. " * 200), "n")
    assert len(prompts) == PER_NAME
    for i in range(30):
        late_of(prompts, clocked(0, user(f"{i}")))
    assert len(prompts) == 16


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TEMPLATES = {
    CHATML: True,
    # Qwen 3.6 and others: the system message must be the first.
    "{% for m in messages %}{{ fail() if m.role == 'system' and not loop.first }}{{ m.content }}{% endfor %}": False,
    # Mistral's old ones take no role but the user's and the assistant's behind the first.
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}": False,
    # All system messages in front.
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}": False,
    # The last message is marked.
    "{% for m in messages %}{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}": False,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_takes_a_late_system_message_or_not(template: str) -> None:
    def render(messages: list[dict[str, str]]) -> str:
        return jinja2.Environment().from_string(template).render(messages=messages)

    assert takes_late_system(render) is TEMPLATES[template]


def test_a_request_chooses_by_field_or_header() -> None:
    def way(default: str, own: Any = None, header: str = "") -> str:
        data = clocked(1) | ({} if own is None else {"ctxwin": {"volatile": own}})
        headers = {"x-ctxwin-volatile": header} if header else {}
        options = read_options("/v1/chat/completions", headers, data, "off", PromptOptions(volatile=default))
        return options.prompt.volatile if options is not None else ""

    assert [way(""), way("late"), way("", "late"), way("late", "off")] == ["", "late", "late", ""]
    assert [way("", None, "append"), way("late", None, "off"), way("late", "append", "off")] == ["append", "", "append"]
    with pytest.raises(ValueError, match="volatile must be late, append or off, got 'early'"):
        way("", "early")
