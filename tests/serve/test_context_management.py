"""What ``context_management`` and a policy clear, in each API's own shape of calls, results and pictures."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ctxwin.serve.context_management import CLEARED, Policy, manage

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


def test_what_is_not_done_is_said(tmp_path: Path) -> None:
    wrongs: list[Any] = [
        {"edits": [{"type": "compact_20260112"}]},
        {"edits": [{"type": "clear_images", "keep": 3}]},
        [],
        "auto",
    ]
    for bad in wrongs:
        with pytest.raises(ValueError, match=r"context_management|edits|must|valid"):
            manage({"messages": [], "context_management": bad}, None, words)
    file = tmp_path / "policy.toml"
    file.write_text("budget = 24000\npictures = 4\nexclude_tools = ['memory']\n")
    assert Policy.read(file) == Policy(budget=24000, pictures=4, exclude_tools=("memory",))
    for wrong in ("budget = 0", "images = 3", "budget ="):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"policy\.toml must hold budget"):
            Policy.read(file)
