"""What ``context_management`` and a policy clear, in each API's own shape of calls, results and pictures."""

from __future__ import annotations

import copy
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin_chats.compaction import take_compaction
from ctxwin_chats.context_management import CLEARED, Policy, manage

NAMES = ["look", "read", "look", "keep", "look"]


def words(value: Any) -> int:
    """Counts words, ten for a picture."""
    if isinstance(value, dict):
        if value.get("type") in ("image_url", "input_image", "image"):
            return 10
        return sum(map(words, value.values()))
    return sum(map(words, value)) if isinstance(value, list) else len(value.split()) if isinstance(value, str) else 0


def chat() -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for i, name in enumerate(NAMES):
        call = {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"n": i})}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": f"result {i} " + "word " * 20})
    return {"messages": messages}


def responses() -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": "go"}]
    for i, name in enumerate(NAMES):
        items.append({"type": "function_call", "call_id": f"c{i}", "name": name, "arguments": json.dumps({"n": i})})
        items.append({"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i} " + "word " * 20})
    return {"input": items}


def messages() -> dict[str, Any]:
    turns: list[Any] = [{"role": "user", "content": "go"}]
    for i, name in enumerate(NAMES):
        call = {"type": "tool_use", "id": f"c{i}", "name": name, "input": {"n": i}}
        turns.append({"role": "assistant", "content": [{"type": "text", "text": "well"}, call]})
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": f"result {i} " + "word " * 20}
        turns.append({"role": "user", "content": [result]})
    return {"messages": turns}


def clear(**fields: Any) -> dict[str, Any]:
    return {"edits": [{"type": "clear_tool_uses_20250919", **fields}]}


def left(data: dict[str, Any]) -> list[bool]:
    """Whether each result is still there."""
    text = json.dumps(data)
    return [f"result {i} " in text for i in range(len(NAMES))]


@pytest.mark.parametrize("make", [chat, responses, messages])
class TestToolResults:
    def test_the_oldest_are_cleared_but_for_those_to_keep(self, make: Any) -> None:
        data = make()
        asked = clear(trigger={"type": "tool_uses", "value": 4}, keep={"type": "tool_uses", "value": 2})
        applied = manage({**data, "context_management": asked}, None, words)
        assert left(data) == [False, False, False, True, True] and json.dumps(data).count(CLEARED) == 3
        freed = 3 * (22 - words(CLEARED))
        assert applied == [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 3, "cleared_input_tokens": freed}]
        assert '"n' in json.dumps(data).replace("\\", "") and len(json.dumps(data).split("c0")) == 3  # calls stay

    def test_cleared_once_nothing_is_left_to_clear(self, make: Any) -> None:
        data = make()
        asked = clear(trigger={"type": "tool_uses", "value": 0})
        assert manage({**data, "context_management": asked}, None, words)
        before = copy.deepcopy(data)
        assert manage({**data, "context_management": asked}, None, words) == [] and data == before

    def test_what_the_edit_says_is_kept(self, make: Any) -> None:
        cases: list[tuple[dict[str, Any], list[bool]]] = [
            ({"trigger": {"type": "tool_uses", "value": 5}}, [True] * 5),
            ({}, [True] * 5),  # far below the API's 100,000 tokens
            ({"trigger": {"type": "input_tokens", "value": 100}}, [False, False, True, True, True]),
            ({"trigger": {"type": "input_tokens", "value": 100}, "clear_at_least": {"type": "input_tokens", "value": 99}},
             [True] * 5),
            ({"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": 0}, "exclude_tools": ["look"]},
             [True, False, True, False, True]),
            ({"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": 9}}, [True] * 5),
        ]  # fmt: skip
        for fields, expected in cases:
            data = make()
            manage({**data, "context_management": clear(**fields)}, None, words)
            assert left(data) == expected, fields

    def test_arguments_go_too_where_that_is_asked(self, make: Any) -> None:
        data = make()
        asked = clear(trigger={"type": "tool_uses", "value": 0}, clear_tool_inputs=True)
        manage({**data, "context_management": asked}, None, words)
        text = json.dumps(data).replace("\\", "")
        assert [f'"n": {i}' in text for i in range(5)] == [False, False, True, True, True]

    def test_a_policy_does_it_for_who_says_nothing(self, make: Any) -> None:
        policy = Policy(budget=100, keep=1, exclude_tools=("keep",))
        data = make()
        assert manage(data, policy, words) and left(data) == [False, False, False, True, True]
        data = make()
        assert manage({**data, "context_management": {"edits": []}}, policy, words) == [] and all(left(data))
        data = make()
        assert manage(data, None, words) is None and all(left(data))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=25),
    st.integers(0, 4),
    st.integers(0, 90),
    st.sampled_from(["input_tokens", "tool_uses"]),
)
def test_what_is_cleared_goes_in_batches_of_a_history_that_is_sent_whole(
    sizes: list[int], keep: int, least: int, unit: str
) -> None:
    """The prefix breaks once a batch: of each request the same results are cleared as of the last one, or a batch more."""
    least = least // 20 if unit == "tool_uses" else least
    before = 0
    for n in range(1, len(sizes) + 1):
        turns = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i} " + "word " * sizes[i]} for i in range(n)]
        data = {"messages": turns}
        fields = {"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": keep}}
        asked = clear(**fields, clear_at_least={"type": unit, "value": least})
        applied = manage({**data, "context_management": asked}, None, words)
        cleared = [turn["content"] == CLEARED for turn in turns]
        number = sum(cleared)
        assert cleared == [True] * number + [False] * (n - number) and number >= before and n - number >= min(keep, n)
        assert bool(applied) == (number > 0)
        worth = [max(0, 1 + size - words(CLEARED)) if unit == "input_tokens" else 1 for size in sizes]
        if number > before:
            assert sum(worth[before:number]) >= least
        assert sum(worth[number : max(number, n - keep)]) < max(1, least)
        before = number


def test_pictures_leave_in_batches_too() -> None:
    left_of = []
    for n in range(1, 12):
        url = {"type": "image_url", "image_url": {"url": "data:..."}}
        data = {"messages": [{"role": "user", "content": [dict(url)]} for _ in range(n)]}
        manage(data, Policy(pictures=3, pictures_at_once=4), words)
        left_of.append(json.dumps(data).count("..."))
    assert left_of == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3]


def test_pictures_leave_wherever_they_stand() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:..."}}
    shown = {"type": "input_image", "image_url": "data:..."}
    source = {"type": "image", "source": {"type": "base64", "data": "..."}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [source, {"type": "text", "text": "seen"}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [shown]}

    def user(*parts: Any) -> dict[str, Any]:
        return {"role": "user", "content": copy.deepcopy([*parts])}

    for data, kind in [
        ({"messages": [user(url, {"type": "text", "text": "a"}, url), user(url)]}, "text"),
        ({"messages": [user(result, source), user(source)]}, "text"),
        ({"input": [user(shown, shown), output]}, "input_text"),
    ]:
        freed = 2 * (10 - words(CLEARED))
        applied = manage(data, Policy(pictures=1), words)
        assert applied == [{"type": "clear_images", "cleared_images": 2, "cleared_input_tokens": freed}]
        text = json.dumps(data)
        assert text.count(json.dumps({"type": kind, "text": CLEARED})) == 2 and text.count("...") == 1


def thoughts(kind: str) -> dict[str, Any]:
    """A conversation of three turns that were thought about, and one that was not, in the shape of an API."""
    turns: list[Any] = []
    for i in range(4):
        text, thought = {"type": "text", "text": f"answer {i}"}, f"thought {i} is long"
        turns.append({"role": "user", "content": f"go {i}"})
        if kind == "messages":
            block = (
                {"type": "thinking", "thinking": thought, "signature": ""}
                if i
                else {"type": "redacted_thinking", "data": thought}
            )
            turns.append({"role": "assistant", "content": [text] if i == 2 else [block, text]})
        elif kind == "chat":
            turns.append({"role": "assistant", "content": f"answer {i}", **({} if i == 2 else {"reasoning": thought})})
        else:
            item = {
                "type": "reasoning",
                "id": f"r{i}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": thought}],
            }
            turns += [item] * (i != 2) + [{"role": "assistant", "content": f"answer {i}"}]
    return {"input" if kind == "responses" else "messages": turns}


@pytest.mark.parametrize("kind", ["messages", "chat", "responses"])
@pytest.mark.parametrize(
    ("keep", "left"),
    [(None, {3}), ({"type": "thinking_turns", "value": 2}, {1, 3}), ({"type": "all"}, {0, 1, 3}), ("all", {0, 1, 3})],
)
def test_thinking_of_old_turns_leaves(kind: str, keep: Any, left: set[int]) -> None:
    data = thoughts(kind)
    edit = {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}
    data["context_management"] = {"edits": [edit]}
    applied = manage(data, None, words)
    text = json.dumps(data)
    assert {i for i in range(4) if f"thought {i} " in text} == left
    assert all(f"answer {i}" in text and f"go {i}" in text for i in range(4))
    cleared = 3 - len(left)
    assert [a["cleared_thinking_turns"] for a in applied or ()] == [cleared] * bool(cleared)
    assert all(a["cleared_input_tokens"] >= 4 * cleared for a in applied or ())


def test_a_turn_of_nothing_but_thinking_is_still_a_turn() -> None:
    only = {"role": "assistant", "content": [{"type": "thinking", "thinking": "long", "signature": ""}]}
    data = {"messages": [only, {"role": "user", "content": "go"}, *thoughts("messages")["messages"]]}
    manage({**data, "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, None, words)
    assert data["messages"][0]["content"] == [{"type": "text", "text": CLEARED}]


@pytest.mark.parametrize("make", [chat, responses, messages])
def test_arguments_of_named_tools_go(make: Any) -> None:
    data = make()
    asked = clear(
        trigger={"type": "tool_uses", "value": 0}, keep={"type": "tool_uses", "value": 0}, clear_tool_inputs=["look"]
    )
    manage({**data, "context_management": asked}, None, words)
    text = json.dumps(data).replace("\\", "")
    assert [f'"n": {i}' in text for i in range(5)] == [name != "look" for name in NAMES]


AMOUNTS = {"input_tokens": 7, "tool_uses": 2, "thinking_turns": 3}
"""A value for each kind of amount in the official client's types."""


def examples(hint: Any) -> list[Any]:
    """Values of a type of the official client's: every alternative, every field with and without."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Required, typing.Annotated):
        return examples(arguments[0])
    if origin is typing.Union or isinstance(hint, types.UnionType):
        return [value for argument in arguments for value in examples(argument)]
    if origin is typing.Literal:
        return [*arguments]
    if typing_extensions.is_typeddict(hint):
        fields = typing_extensions.get_type_hints(hint, include_extras=True)
        required = {name for name, kind in fields.items() if typing.get_origin(kind) is typing.Required}
        fixed = {name: examples(fields[name])[0] for name in sorted(required)}
        if "value" in fixed:
            return [{**fixed, "value": AMOUNTS[fixed["type"]]}]
        optional = [(name, kind) for name, kind in fields.items() if name not in fixed]
        return [fixed, *({**fixed, name: value} for name, kind in optional for value in examples(kind))]
    if hint in (type(None), bool, str, int):
        return {type(None): [None], bool: [False, True], str: ["look"], int: [5]}[hint]
    return [["look"]]  # a sequence of names


def test_every_edit_of_the_official_clients_is_taken() -> None:
    """By their types of today: an edit or a field that they gain fails here first."""
    from anthropic.types.beta import beta_context_management_config_param as anthropic
    from openai.types.responses.response_create_params import ContextManagement

    edits = [edit for kind in typing.get_args(anthropic.Edit) for edit in examples(kind)]
    assert {edit["type"] for edit in edits} >= {
        "clear_thinking_20251015",
        "clear_tool_uses_20250919",
        "compact_20260112",
    }
    assert len(edits) > 15
    for edit in edits:
        data = {**messages(), "context_management": {"edits": [edit]}}
        assert (take_compaction("/v1/messages", data) is not None) == (edit["type"] == "compact_20260112")
        manage(data, None, words)
    for entry in examples(ContextManagement):
        data = {**responses(), "context_management": [{**entry, "type": "compaction"}]}
        assert take_compaction("/v1/responses", data) is not None and manage(data, None, words) is None
    for nothing in ({}, {"edits": []}):
        assert manage({**messages(), "context_management": nothing}, None, words) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"edits": [{"type": "compact_20260112"}]}, "/v1/messages takes compact_20260112"),
        ({"edits": [{"type": "clear_thinking_20270101"}]}, "got 'clear_thinking_20270101'; leave it out"),
        ({"edits": [{"type": {"a": 1}}]}, "an edit must be one of clear_tool_uses_20250919, clear_thinking_20251015"),
        ({"edits": ["clear_images"]}, "edits.0"),
        ([{"type": "compaction"}], "on /v1/responses"),
    ],
)
def test_an_edit_that_there_is_not_is_named_with_what_to_do(asked: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        manage({"messages": [], "context_management": asked}, None, words)


def test_what_is_not_done_is_said(tmp_path: Path) -> None:
    wrongs: list[Any] = [
        {"edits": [{"type": "compact_20260112"}]},
        {"edits": [{"type": "clear_images", "keep": 3}]},
        [],
        "auto",
    ]
    for bad in wrongs:
        with pytest.raises(ValueError, match=r"context_management|edits|must|valid|compact_20260112"):
            manage({"messages": [], "context_management": bad}, None, words)
    file = tmp_path / "policy.toml"
    file.write_text(
        "budget = 24000\nclear_at_least = 4000\npictures = 4\npictures_at_once = 2\nexclude_tools = ['memory']\n",
        encoding="utf-8-sig",
    )
    policy = Policy(budget=24000, clear_at_least=4000, pictures=4, pictures_at_once=2, exclude_tools=("memory",))
    assert Policy.read(file) == policy
    for wrong in ("budget = 0", "images = 3", "budget =", "pictures_at_once = 0"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"policy\.toml must hold budget"):
            Policy.read(file)
