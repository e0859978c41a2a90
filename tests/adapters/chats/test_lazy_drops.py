"""Lazy drops without an engine: what is served of a history, held against a model that knows what the client did to it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ctxwin_chats.continuation import Part
from ctxwin_chats.lazy_drops import Bounds, Kept, LazyDrops
from ctxwin_chats.records import PER_NAME

CONTEXT = 10**6
DIALECTS = ("chat", "messages", "responses")
TURNS = {"chat": "messages", "messages": "messages", "responses": "input"}
NARROWER = {
    "user": {("shown", "text"), ("shown", "gone"), ("text", "gone")},
    "tool": {("shown", "gone"), ("shown", "text"), ("gone", "text")},
}
"""How a group may look in what is sent, where it looked otherwise in what was served."""


def words(value: Any) -> int:
    """Words of texts, ten for a picture."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list):
        return sum(map(words, value))
    if not isinstance(value, dict):
        return 0
    if value.get("type") in ("image_url", "input_image", "image"):
        return 10
    return sum(words(value.get(name)) for name in ("text", "content", "output"))


def picture(dialect: str, of: str) -> dict[str, Any]:
    if dialect == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": of}}
    url = f"data:image/png;base64,{of}"
    if dialect == "responses":
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    return {"type": "image_url", "image_url": {"url": url}}


def text(dialect: str, of: str) -> dict[str, Any]:
    return {"type": "input_text" if dialect == "responses" else "text", "text": of}


@dataclass(frozen=True)
class Group:
    """A user's turn with its answer, or a tool's call with its result; ``look``: of its picture."""

    kind: str
    number: int
    answer: str = "ok"
    look: str = "shown"
    says: str = ""

    def turns(self, dialect: str, *, ended: bool = True) -> list[dict[str, Any]]:
        shown = picture(dialect, f"P{self.number}")
        says = text(dialect, f"step {self.number}{self.says}")
        if self.kind == "user":
            middle = {"shown": [shown], "text": [text(dialect, "[image omitted]")], "gone": []}[self.look]
            asked = {"role": "user", "content": [says, *middle]}
            return [asked, {"role": "assistant", "content": self.answer}] if ended else [asked]
        name, result = f"call{self.number}", {"shown": [says, shown], "gone": [says], "text": "[cleared]"}[self.look]
        if dialect == "chat":
            call = {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            return [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": name, "content": result},
            ]
        if dialect == "messages":
            use = {"type": "tool_use", "id": name, "name": "look", "input": {}}
            answer = {"type": "tool_result", "tool_use_id": name, "content": result}
            return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
        return [
            {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": name, "output": result},
        ]


def body(dialect: str, groups: list[Group], rules: str = "Rules.") -> dict[str, Any]:
    turns = [turn for group in groups for turn in group.turns(dialect, ended=group is not groups[-1])]
    if dialect == "chat":
        return {"messages": [{"role": "system", "content": rules}, *turns], "max_tokens": 5}
    field, most = ("system", "max_tokens") if dialect == "messages" else ("instructions", "max_output_tokens")
    return {TURNS[dialect]: turns, field: rules, most: 5}


def serve(drops: LazyDrops, sent: dict[str, Any], bounds: Bounds, context: int = CONTEXT, name: str = "n") -> Any:
    """What is served of a body, and what of it was kept; what the server then does to it must not reach the memory."""
    served = copy.deepcopy(sent)
    kept = drops.serve(served, name, bounds, words, context)
    answer = copy.deepcopy(served)
    for turn in served.get("messages", served.get("input")):
        for part in turn.get("content") or () if isinstance(turn.get("content"), list) else ():
            part["uuid"] = "a tenant's"
    return answer, kept


@dataclass(frozen=True)
class Served:
    """What was served once, and for how many requests in a row it was longer than sent."""

    groups: list[Group]
    rules: str
    turns: int


class Client:
    """A conversation: what the client holds of it, and all that it was served, the newest last."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.groups: list[Group] = []
        self.rules = "Rules."
        self.past: list[Served] = []
        self.sent: list[Group] = []

    def grow(self, kind: str, answer: str) -> None:
        self.groups.append(Group(kind, self.next, answer))
        self.next += 1

    def continued(self, past: Served, dialect: str) -> list[Group] | None:
        """What was served with the new groups behind it; None where the client did more than to drop and to append."""
        known = {group.number for group in past.groups}
        old = [group for group in self.groups if group.number in known]
        if self.rules != past.rules or self.groups[: len(old)] != old or len(old) == len(self.groups) or not old:
            return None
        if old[-1].number != past.groups[-1].number:
            return None
        rest = iter(past.groups)
        for group in old:
            was = next((w for w in rest if w.number == group.number), None)
            cleared = group.kind == "tool" and group.look == "text"  # which shows nothing of what it said
            if was is None or replace(was, look="", says="") != replace(group, look="", says=""):
                return None
            if was.says != group.says and not cleared:
                return None
            if was.look != group.look and (was.look, group.look) not in NARROWER[group.kind]:
                return None
        longer = [*past.groups, *self.groups[len(old) :]]
        turns = body(dialect, longer)[TURNS[dialect]][len(body(dialect, past.groups)[TURNS[dialect]]) :]
        made = "".join("A" if t.get("role") == "assistant" or t.get("type") == "function_call" else "u" for t in turns)
        return longer if "uA" not in made else None


class Histories(RuleBasedStateMachine):
    """Two conversations under one name, whose clients append, drop, replace, bring back, edit and reorder."""

    @initialize(
        dialect=st.sampled_from(DIALECTS),
        pictures=st.integers(0, 6),
        tokens=st.sampled_from([40, 10**6]),
        turns=st.integers(0, 5),
        context=st.sampled_from([300, CONTEXT]),
    )
    def begin(self, dialect: str, pictures: int, tokens: int, turns: int, context: int) -> None:
        self.drops = LazyDrops(16, 1e9)
        self.bounds, self.context, self.dialect = Bounds(pictures, tokens, turns), context, dialect
        self.clients = [Client(1), Client(1001)]

    @property
    def client(self) -> Client:
        return self.clients[0]

    @rule(
        habit=st.sampled_from(["drop", "text", "gone"]),
        keep=st.integers(1, 3),
        turns=st.integers(1, 4),
        other=st.booleans(),
    )
    def loop(self, habit: str, keep: int, turns: int, other: bool) -> None:
        """A few turns of an agent that keeps its newest pictures; ``other``: the other conversation goes on then."""
        for _ in range(turns):
            self.client.grow("tool", "ok")
            if habit == "drop":
                self.drop_oldest(keep + 1)
            for at in range(len(self.client.groups) - keep):
                self.look_otherwise(at, self.client.groups[at].look if habit == "drop" else habit)
            self.ask(again=False)
        if other:
            self.clients.reverse()

    @rule(kind=st.sampled_from(["user", "tool"]), answer=st.sampled_from(["ok", "click"]))
    def grow(self, kind: str, answer: str) -> None:
        self.client.grow(kind, answer)

    @rule(keep=st.integers(1, 4))
    def drop_oldest(self, keep: int) -> None:
        self.client.groups = self.client.groups[-keep:]

    @rule(at=st.integers(0, 9))
    def drop_one(self, at: int) -> None:
        if len(self.client.groups) > at + 1:
            del self.client.groups[at]

    @rule(at=st.integers(0, 9), look=st.sampled_from(["shown", "text", "gone"]))
    def look_otherwise(self, at: int, look: str) -> None:
        if len(self.client.groups) > at + 1:
            self.client.groups[at] = replace(self.client.groups[at], look=look)

    @rule(at=st.integers(0, 3))
    def edit(self, at: int) -> None:
        if len(self.client.groups) > at:
            group = self.client.groups[at]
            self.client.groups[at] = replace(group, says=group.says + " edited")

    @rule()
    def tell_the_time(self) -> None:
        self.client.rules += " It is later."

    @rule(at=st.integers(0, 4))
    def swap(self, at: int) -> None:
        groups = self.client.groups
        if len(groups) > at + 1:
            groups[at], groups[at + 1] = groups[at + 1], groups[at]

    @rule(at=st.integers(0, 4))
    def insert(self, at: int) -> None:
        self.client.grow("user", "ok")
        self.client.groups.insert(at, self.client.groups.pop())

    @rule(again=st.booleans())
    def ask(self, again: bool) -> None:
        """With a new group at the end, as nearly every request has, or the last one again."""
        client = self.client
        if not again or not client.sent or client.groups != client.sent:
            client.grow("user", "ok")
        sent = body(self.dialect, client.groups, client.rules)
        served, kept = serve(self.drops, sent, self.bounds, self.context)
        wanted = [
            (groups, past.turns + 1)
            for past in client.past
            if (groups := client.continued(past, self.dialect)) is not None
        ]
        longer = [(groups, turns) for groups, turns in wanted if body(self.dialect, groups, client.rules) != sent]
        if served != sent:
            fitting = [one for one in longer if body(self.dialect, one[0], client.rules) == served]
            groups, turns = next(one for one in fitting if one[1] == kept.turns)
            assert self.exceeded(groups, turns, kept) == [] and kept.parts > 0
        elif (
            client.past
            and (last := client.continued(client.past[-1], self.dialect))
            and (last, client.past[-1].turns + 1) in longer
        ):
            assert kept == Kept(followed=True) and self.exceeded(last, client.past[-1].turns + 1, None)
        else:
            assert kept == Kept(followed=kept.followed) and (longer or not kept.followed)
        assert_paired(served[TURNS[self.dialect]])
        client.past.append(Served(groups if kept.parts else [*client.groups], client.rules, kept.turns))
        client.sent = [*client.groups]

    def exceeded(self, groups: list[Group], turns: int, kept: Kept | None) -> list[str]:
        """The bounds that a longer history exceeds; ``kept`` must say what it has beyond what was sent."""
        client, name = self.client, TURNS[self.dialect]
        sent, longer = (body(self.dialect, one, client.rules) for one in (client.groups, groups))
        sent_looks = {group.number: group.look for group in client.groups}
        placeholders = [g for g in groups if sent_looks.get(g.number, g.look) == "text" != g.look]
        tokens = words(longer[name]) - words(sent[name]) + sum(2 if g.kind == "user" else 1 for g in placeholders)
        pictures = json.dumps(longer).count("P") - json.dumps(sent).count("P")
        rules = longer.get("system") or longer.get("instructions")
        whole = words(longer[name]) + 16 * len(longer[name]) + 16 + 5 + words(rules)
        assert kept is None or (kept.pictures, kept.tokens) == (pictures, tokens)
        bounds = {
            "pictures": pictures > self.bounds.pictures,
            "tokens": tokens > self.bounds.tokens,
            "turns": turns > self.bounds.turns,
            "context": whole > self.context,
        }
        return [bound for bound, exceeded in bounds.items() if exceeded]


def assert_paired(turns: list[dict[str, Any]]) -> None:
    """Every result answers a call in front of it, and every call has one."""
    waiting: list[Any] = []
    for turn in turns:
        parts = turn["content"] if isinstance(turn.get("content"), list) else []
        for part in (turn, *(turn.get("tool_calls") or ()), *parts):
            if part.get("type") in ("function", "tool_use", "function_call"):
                waiting.append(part.get("call_id") or part.get("id"))
            result = part.get("tool_call_id") or part.get("tool_use_id")
            if part.get("type") == "function_call_output":
                result = part["call_id"]
            if result:
                waiting.remove(result)
    assert not waiting


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def shown_turns(*numbers: int) -> list[dict[str, Any]]:
    return [turn for n in numbers for turn in Group("user", n).turns("chat")]


def chat(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "Rules."}, *turns], "max_tokens": 5, **fields}


def asked(number: int) -> dict[str, Any]:
    return Group("user", number).turns("chat")[0]


def in_one(first: int, last: int, question: str) -> dict[str, Any]:
    parts = [part for n in range(first, last) for part in asked(n)["content"]]
    return chat({"role": "user", "content": [*parts, text("chat", question)]})


@pytest.mark.parametrize("ask", ["question {}", "What next?"])
def test_pictures_in_one_message_slide_lazily(ask: str) -> None:
    drops, bounds, seen = LazyDrops(4, 1e9), Bounds(pictures=2), []
    for turn in range(7):
        sent = in_one(turn, turn + 4, ask.format(turn))
        served, kept = serve(drops, sent, bounds)
        assert served == in_one(turn - kept.pictures, turn + 4, ask.format(turn))
        assert served["messages"][-1]["content"][-1]["text"] == ask.format(turn)
        seen.append((kept.pictures, kept.followed))
    assert seen == [(0, False), (1, False), (2, False), (0, True), (1, False), (2, False), (0, True)]


def edits() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Histories behind ``[1, 2, 3, question]``, as sent before, that are no drops."""
    before = chat(*shown_turns(1, 2), asked(3))
    new = [{"role": "assistant", "content": "ok"}, asked(4)]
    described = chat(*shown_turns(1, 2), asked(3), *new)
    described["messages"][1]["content"][1] = text("chat", "a red car")
    redacted = copy.deepcopy(described)
    redacted["messages"][1]["content"][1] = text("chat", "[redacted]")
    linked = copy.deepcopy(before)
    linked["messages"][1]["content"][1]["image_url"]["url"] = "https://example.com/a.png"
    exchanged = chat(*shown_turns(2), asked(3))
    exchanged["messages"][-1]["content"][0] = text("chat", "other")
    call = Group("tool", 7).turns("chat")[0]
    return {
        "described": (before, described),
        "redacted": (before, redacted),
        "what is linked may change": (linked, chat(*shown_turns(2), asked(3), *new)),
        "the newest turn is another": (before, chat(*shown_turns(2), asked(4))),
        "the newest turn is edited": (before, exchanged),
        "the same again": (before, before),
        "back to an older turn": (before, chat(*shown_turns(1), asked(2))),
        "rules are gone": (before, {"messages": chat(*shown_turns(2), asked(3), *new)["messages"][1:]}),
        "other rules": (before, chat(*shown_turns(2), asked(3), *new, tools=[{"type": "function"}])),
        "another salt": (before, chat(*shown_turns(2), asked(3), *new, cache_salt="other")),
        "a call without a result": (chat(call, *shown_turns(1), asked(3)), chat(*shown_turns(1), asked(3), *new)),
        "moved to the end": (before, chat(*shown_turns(2), asked(3), new[0], asked(1))),
        "cut by vLLM": (before, chat(*shown_turns(2), asked(3), *new, truncate_prompt_tokens=100)),
        "as one text": (before, {**before, "messages": "x"}),
    }


@pytest.mark.parametrize("which", edits())
def test_what_is_no_drop_is_served_as_sent(which: str) -> None:
    before, after = edits()[which]
    drops = LazyDrops(4, 1e9)
    serve(drops, before, Bounds())
    untouched = copy.deepcopy(after)
    assert drops.serve(after, "n", Bounds(), words, CONTEXT) == Kept() and after == untouched


def dropped() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What was sent first, what is sent then, and what lazy drops serve of that."""
    new = [{"role": "assistant", "content": "ok"}, asked(4)]
    return tuple(chat(*turns) for turns in (  # type: ignore[return-value]
        [*shown_turns(1, 2), asked(3)], [*shown_turns(2), asked(3), *new], [*shown_turns(1, 2), asked(3), *new],
    ))  # fmt: skip


def test_only_the_same_name_and_the_same_memory_are_continued() -> None:
    first, then, longer = dropped()
    drops = LazyDrops(4, 1e9)
    for name, other in (("n", "m"), ("", "")):
        serve(drops, first, Bounds(), name=name)
        assert serve(drops, then, Bounds(), name=other) == (then, Kept())
        assert serve(LazyDrops(4, 1e9), then, Bounds(), name=name) == (then, Kept())  # of another tenant
    serve(drops, first, Bounds())
    assert serve(drops, then, Bounds())[0] == longer
    serve(drops, first, Bounds())
    drops.forget("n")
    assert serve(drops, then, Bounds()) == (then, Kept()) and len(drops) == 2


def test_two_conversations_that_differ_in_what_was_dropped_are_served_as_sent() -> None:
    first, then, _ = dropped()
    other = copy.deepcopy(first)
    other["messages"][1]["content"][1] = picture("chat", "another")
    drops = LazyDrops(4, 1e9)
    serve(drops, first, Bounds())
    serve(drops, other, Bounds())
    assert serve(drops, then, Bounds()) == (then, Kept())


def test_the_memory_is_bounded_by_number_name_bytes_and_age() -> None:
    def remembered(drops: LazyDrops, names: Callable[[int], str]) -> int:
        for i in range(30):
            serve(drops, chat(asked(i)), Bounds(), name=names(i))
        return len(drops)

    size = sum(Part.read(turn).size for turn in chat(asked(10))["messages"])
    assert remembered(LazyDrops(5, 1e9), str) == 5
    assert remembered(LazyDrops(50, 1e9), lambda _: "n") == PER_NAME
    assert remembered(LazyDrops(50, 1e9, 3 * size), str) == 3
    assert remembered(LazyDrops(50, 1e9, size // 2), str) == 0
    assert remembered(LazyDrops(50, 0.0), str) == 1


@pytest.mark.parametrize("same", [True, False])
def test_the_work_is_linear_however_much_repeats(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxwin_chats import continuation

    calls, inner = 0, continuation._lacking

    def counted(old: Part, new: Part) -> Any:
        nonlocal calls
        calls += 1
        return inner(old, new)

    monkeypatch.setattr(continuation, "_lacking", counted)
    turns = [{"role": "user", "content": [text("chat", "c" if same else f"{i}")] * 3} for i in range(400)]
    drops = LazyDrops(4, 1e9)
    serve(drops, chat(*turns, asked(1)), Bounds())
    serve(drops, chat(*turns[1:], *turns), Bounds())
    assert 0 < calls < 20 * len(turns)


def test_bounds_are_read_from_a_text() -> None:
    assert Bounds.parse("off") is None and Bounds.parse("") is None and Bounds.parse("on") == Bounds()
    assert Bounds.parse("pictures=3, turns=2") == Bounds(3, Bounds.tokens, 2)
    for wrong in ("yes", "pictures", "pictures=x", "pictures=-1", "frames=3", "pictures=3,", "{'pictures': 3}"):
        with pytest.raises(ValueError, match=r"must be on, off, or like pictures=8"):
            Bounds.parse(wrong)
