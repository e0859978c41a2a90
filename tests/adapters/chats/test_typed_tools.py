"""Anthropic's typed tools: those that a client runs are described, those that Anthropic runs are refused with a remedy."""

from __future__ import annotations

import copy
import typing
from typing import Any

import pytest
from anthropic.types.beta import BetaToolUnionParam

from ctxwin_chats.typed_tools import describe_tools

SIZE = {"display_width_px": 1024, "display_height_px": 768}


def types_of_today() -> dict[str, set[str]]:
    """The tools of the official client that have a type, and the names that they may have."""
    found = {}
    for tool in typing.get_args(BetaToolUnionParam):
        hints = typing.get_type_hints(tool)
        for kind in typing.get_args(hints["type"]):
            if isinstance(kind, str) and kind != "custom":
                found[kind] = set(typing.get_args(hints.get("name", Any)))
    return found


@pytest.mark.parametrize("kind", types_of_today())
def test_every_typed_tool_of_the_official_client_is_described_or_named(kind: str) -> None:
    names = types_of_today()[kind] or {"any"}
    tool = {"type": kind, "name": next(iter(names)), **(SIZE if kind.startswith("computer_2") else {})}
    data: dict[str, Any] = {"tools": [{"name": "mine", "input_schema": {"type": "object"}}, tool]}
    try:
        assert describe_tools(data)
    except ValueError as error:
        family = kind.rstrip("0123456789_")
        assert family not in ("bash", "text_editor", "computer", "memory")
        assert repr(kind) in str(error) and "run by Anthropic's servers, and not here: " in str(error)
        return
    mine, described = data["tools"]
    assert mine == {"name": "mine", "input_schema": {"type": "object"}}
    assert described["name"] in names and described["description"] and "type" not in described
    schema = described["input_schema"]
    assert schema["type"] == "object" and set(schema["required"]) <= set(schema["properties"])
    assert not describe_tools(copy.deepcopy(data)), "once is enough"


def test_arguments_follow_the_date() -> None:
    def described(**tool: Any) -> dict[str, Any]:
        data = {"tools": [tool]}
        describe_tools(data)
        return data["tools"][0]

    def actions(date: str, **more: Any) -> set[str]:
        schema = described(type=f"computer_{date}", name="computer", **SIZE, **more)["input_schema"]
        return set(schema["properties"]["action"]["enum"])

    assert "scroll" not in actions("20241022") and "scroll" in actions("20250124")
    assert "zoom" not in actions("20251124") and "zoom" in actions("20251124", enable_zoom=True)
    assert "1024 x 768" in described(type="computer_20250124", **SIZE)["description"]
    editor = described(
        type="text_editor_20250728", max_characters=900, cache_control={"type": "ephemeral"}, strict=True
    )
    assert editor["name"] == "str_replace_based_edit_tool" and "900 characters" in editor["description"]
    assert editor["cache_control"] and editor["strict"]
    assert "undo_edit" not in str(editor) and "undo_edit" in str(described(type="text_editor_20250124"))


def test_a_tool_that_a_turn_adds_is_described_too() -> None:
    change: dict[str, Any] = {"type": "tool_definition", "definition": {"type": "bash_20250124", "name": "bash"}}
    data = {"messages": [{"role": "system", "content": [{"type": "tool_addition", "tool": change}]}]}
    assert describe_tools(data) and "command" in change["definition"]["input_schema"]["properties"]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "describe it as a function with name"),
        ({"type": "computer_20990101", "name": "computer"}, "tools must be functions or of a type that is known here"),
        ({"type": "teleport", "name": "teleport"}, "got 'teleport'"),
        ({"type": "computer_20250124", "name": "computer"}, "display_width_px and display_height_px, got None and None"),
        ({"type": "computer_20250124", "display_width_px": True, "display_height_px": "768"}, "got True and '768'"),
    ],
)  # fmt: skip
def test_what_cannot_be_offered_is_named(tool: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"tool|display") as error:
        describe_tools({"tools": [tool]})
    assert said in str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        {}, {"tools": None}, {"tools": "x"}, {"tools": [7, None]}, {"messages": "x"},
        {"messages": [{"content": [{"type": "tool_addition"}]}]},
        {"tools": [{"type": "custom", "name": "a", "input_schema": {}}, {"name": "b"}, {"type": ["list"]}]},
        {"tools": [{"type": "later_20990101", "name": "a", "input_schema": {"type": "object"}}]},
    ],
)  # fmt: skip
def test_everything_else_is_left_as_it_is(data: dict[str, Any]) -> None:
    before = copy.deepcopy(data)
    assert not describe_tools(data) and data == before
