"""Prompts that only grow where their system prompt changes (`volatile=append`), without an engine."""

from __future__ import annotations

import copy
import re
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from adapters.chats.changing_prompts import DIALECTS, body, clocked, lines_of, system_of, user, words
from ctxwin_chats.lazy_drops import Bounds, LazyDrops
from ctxwin_chats.volatile import Late, VolatilePrompts

TAG = re.compile(r"<system>\n(.*?)\n</system>\n\n", re.S)


def grown(
    prompts: VolatilePrompts, data: dict[str, Any], name: str = "n", *, as_system: bool = True
) -> tuple[dict[str, Any], Late]:
    """A request as it is served where its prompt only grows."""
    served = copy.deepcopy(data)
    late = prompts.take(served, name, words)
    return served, prompts.place(served, late, words, as_system=as_system, appends=True)


class GrowingPrompt(RuleBasedStateMachine):
    """One conversation whose prompt only grows, while its client changes system prompt and history."""

    @initialize(dialect=st.sampled_from(DIALECTS[:-1]))
    def begin(self, dialect: str) -> None:
        self.prompts, self.others = VolatilePrompts(16, 1e9), VolatilePrompts(16, 1e9)
        self.dialect, self.next = dialect, 20
        self.lines = [f"Rule {i}." for i in range(10, 19)]
        self.untouched, self.is_most = {*self.lines}, True
        self.sent: list[dict[str, Any]] = [user("begin")]
        self.last: tuple[str, Any, list[dict[str, Any]]] | None = None  # first turn, system prompt, turns and answer
        self.serve(grows=False)

    def new(self) -> str:
        self.next += 1
        return f"Rule {self.next}."

    @rule(at=st.integers(0, 9), change=st.sampled_from(["tick", "add", "drop", "swap", "first"]))
    def change(self, at: int, change: str) -> None:
        at = 1 + at % (len(self.lines) - 1)
        if change != "add":
            self.untouched -= {*self.lines[at - (change == "swap") : at + 1]}
        if change == "add":
            self.lines.insert(at, self.new())
        elif change == "drop" and len(self.lines) > 3:
            del self.lines[at]
        elif change == "swap":
            self.lines[at - 1], self.lines[at] = self.lines[at], self.lines[at - 1]
        elif change == "first":
            self.lines[at] = f"Rule {10 + at % 9}."  # as it was first, perhaps
        else:
            self.lines[at] = self.new()

    @rule()
    def ask(self) -> None:
        self.sent += [{"role": "assistant", "content": "ok"}, user(self.new())]
        self.serve(grows=True)

    @rule()
    def retry(self) -> None:
        self.serve(grows=False)

    @rule(at=st.integers(0, 9))
    def edit(self, at: int) -> None:
        at = at % len(self.sent) // 2 * 2
        self.sent[at:] = [user(self.new())]
        self.serve(grows=False)

    @rule()
    def drop(self) -> None:
        del self.sent[: 2 if len(self.sent) > 1 else 0]
        self.serve(grows=False)

    def serve(self, *, grows: bool) -> None:
        sent = body(self.dialect, self.lines, "\n", self.sent)
        served, late = grown(self.prompts, sent, as_system=False)
        name = "input" if "input" in served else "messages"
        turns = served[name][len(served[name]) - len(self.sent) :]
        head = {**served, name: served[name][: -len(self.sent)]}
        standing = lines_of(system_of(self.dialect, head))
        shown = [line for turn in turns for text in TAG.findall(turn["content"]) for line in text.splitlines()]
        assert [{**turn, "content": TAG.sub("", turn["content"])} for turn in turns] == self.sent
        assert set(self.lines) <= {*standing, *shown}, "no line is lost"
        gone = [line for line in standing if line not in self.lines]
        assert (late.parts, late.tokens) == (len(shown) + len(gone), words(" ".join([*shown, *gone])))
        assert TAG.findall(turns[-1]["content"]) == ([late.text] if late.text else [])
        assert late.earlier == late.tokens - words(late.text)
        self.is_most &= 2 * sum(line in self.untouched for line in self.lines) > len(self.lines)
        if self.last is not None and self.last[0] == self.sent[0]["content"]:
            assert self.last[1] == head or (not gone and not self.is_most), "the system prompt stays"
            if grows and self.is_most:
                assert turns[: len(self.last[2])] == self.last[2], "the prompt only grows"
        self.last = (self.sent[0]["content"], head, [*turns, {"role": "assistant", "content": "ok"}])
        self.check_form(sent, turns, head[name])

    def check_form(self, sent: dict[str, Any], turns: list[dict[str, Any]], rules: list[dict[str, Any]]) -> None:
        """As system messages it is the same, in front of its turns."""
        expected = list(rules)
        for turn in turns:
            expected += [{"role": "system", "content": text} for text in TAG.findall(turn["content"])]
            expected.append({**turn, "content": TAG.sub("", turn["content"])})
        served, _ = grown(self.others, sent, as_system=True)
        assert served["input" if "input" in served else "messages"] == expected


TestGrowingPrompt = GrowingPrompt.TestCase
TestGrowingPrompt.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def history(turns: int) -> list[dict[str, Any]]:
    return [turn for i in range(turns) for turn in (user(f"step {i}"), {"role": "assistant", "content": "ok"})][:-1]


def test_a_growing_prompt_shows_each_line_once_while_it_stands() -> None:
    prompts, memory, seen, watch = (
        VolatilePrompts(16, 1e9),
        "Tea is preferred.",
        [],
        "You watch a door for us, and say who comes.",
    )
    for time, rules in enumerate((watch, f"{watch}\n{memory}", f"{watch}\n{memory}", watch, watch)):
        served, late = grown(prompts, clocked(time // 2, *history(time + 1), rules=rules))
        assert served["messages"][0] == clocked(0, rules=watch)["messages"][0]
        seen.append((late.text, late.parts, late.earlier))
    first, second = "It is 1.", "It is 2."
    assert seen == [("", 0, 0), (memory, 1, 0), (first, 3, 3 + 3), ("", 3, 3 + 3 + 3), (second, 4, 3 + 3 + 3)]


def test_what_a_request_did_not_have_when_it_was_sent_again_is_not_appended() -> None:
    prompts = VolatilePrompts(16, 1e9)
    for time, turns, shown in ((0, 1, []), (1, 2, [1]), (0, 2, []), (2, 3, [2]), (3, 4, [2, 3])):
        served, _ = grown(prompts, clocked(time, *history(turns)))
        clocks = [turn["content"] for turn in served["messages"][1:] if turn["role"] == "system"]
        assert clocks == [f"It is {time}." for time in shown]


def test_a_growing_prompt_is_bounded() -> None:
    """Beyond the bound the text of the time is late; where the history begins anew, it alone is left."""
    prompts, earlier = VolatilePrompts(16, 1e9, 16 * (3 + 13 + 13)), []
    for time in range(6):
        served, late = grown(prompts, clocked(time, *history(time + 1)))
        clocks = [turn["content"] for turn in served["messages"] if turn["role"] == "system"]
        assert clocks[-1].endswith(f"It is {time}.") and clocks[0] == "You watch.\nIt is 0."
        earlier.append(late.earlier)
    assert earlier == [0, 3, 6, 9, 9, 9]
    served, late = grown(prompts, clocked(6, *history(7)[2:]))
    shown = [turn["content"] for turn in served["messages"] if turn["role"] == "system"]
    assert late.earlier == 0 and shown == ["You watch.\n", "It is 6."]
    prompts = VolatilePrompts(16, 1e9, 16 * 2)
    for time in range(3):
        served, late = grown(prompts, clocked(time, *history(time + 1)))
        shown = [turn["content"] for turn in served["messages"] if turn["role"] == "system"]
        assert late.earlier == 0 and shown == (["You watch.\n", f"It is {time}."] if time else ["You watch.\nIt is 0."])


def test_agents_of_one_name_have_growing_prompts_of_their_own() -> None:
    prompts = VolatilePrompts(16, 1e9)
    for scale in (3, 100):
        for time in range(3):
            for verb, other in (("Plan", "Code"), ("Code", "Plan")):
                rules = " ".join(["Be brief.", *(f"{verb} {i} well." for i in range(scale))])
                served, _ = grown(prompts, clocked(time, *history(time + 1), rules=rules))
                assert str(served).count(verb) == scale and other not in str(served)
                assert f"It is {time}." in str(served)


def test_another_picture_in_a_system_prompt_is_another_one() -> None:
    prompts = VolatilePrompts(16, 1e9)
    for time in range(3):
        picture = {"type": "image_url", "image_url": {"url": f"data:{time}"}}
        data = clocked(time)
        data["messages"][0]["content"] = [{"type": "text", "text": f"You watch.\nIt is {time}."}, picture]
        served, _ = grown(prompts, data)
        assert picture in served["messages"][0]["content"]


def test_a_growing_prompt_works_behind_lazy_drops() -> None:
    prompts, drops, last = VolatilePrompts(16, 1e9), LazyDrops(4, 1e9), []
    for time in range(1, 7):
        data = clocked(time, *history(time + 1)[2 * max(0, time - 3) :])
        late = prompts.take(data, "n", words)
        drops.serve(data, "n", Bounds(), words, 10**6)
        prompts.place(data, late, words, as_system=True, appends=True)
        assert data["messages"][: len(last)] == last
        last = data["messages"]
    assert [turn["content"] for turn in last if turn["role"] == "system"][1:] == [f"It is {t}." for t in range(2, 7)]
