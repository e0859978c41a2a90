"""Anthropic's typed tools (``{"type": "computer_20250124", ...}``) as functions, the only tools that chat templates know.

Anthropic's models were trained on the tools that clients run, so a request names them by type alone; other models need to see
their arguments. Tools that Anthropic's servers run are refused by name, with a remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

_DATED = re.compile(r"(?P<family>[a-z0-9_]+?)_(?P<date>20\d{6})")
_CLIENT = "run it in your client and describe it as a function with name, description and input_schema"
_REMEDIES = {
    "web_search": _CLIENT,
    "web_fetch": _CLIENT,
    "code_execution": f"{_CLIENT}; bash_20250124 is served",
    "tool_search_tool_bm25": "leave it out, and send the tools that the turn needs",
    "tool_search_tool_regex": "leave it out, and send the tools that the turn needs",
    "advisor": "leave it out",
    "mcp_toolset": "let your client list the tools of the MCP server and send them as functions",
    "computer_toolset": "send computer_20251124, which is served",
    "browser_toolset": _CLIENT,
}
"""Remedies for tools that this server cannot offer, by family."""
_PASSED = ("strict", "defer_loading", "input_examples", "allowed_callers", "cache_control")


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _integers(description: str, count: int) -> Schema:
    return {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": count,
        "maxItems": count,
        "description": description,
    }


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required}


def _bash(tool: Mapping[str, Any], date: str) -> tuple[str, Schema]:
    schema = _object(
        [], command=_text("The command to run."), restart={"type": "boolean", "description": "Start the shell anew."}
    )
    return "Runs a command in a bash shell that stays open between calls.", schema


def _file_commands(place: str, commands: list[str], new_text: str, **more: Schema) -> Schema:
    return _object(
        ["command"],
        command=_text("What to do.", enum=commands),
        path=_text(place),
        file_text=_text("Of create: the content of the file."),
        old_str=_text("Of str_replace: the text to replace, which must stand in the file once."),
        new_str=_text(f"Of str_replace: the text in its place{new_text}."),
        insert_line={
            "type": "integer",
            "description": "Of insert: the line behind which to insert; 0 is the beginning.",
        },
        view_range=_integers("First and last line to show; -1 is the last line of the file.", 2),
        **more,
    )


_INSERTED = {"insert_text": _text("Of insert: the text.")}


def _text_editor(tool: Mapping[str, Any], date: str) -> tuple[str, Schema]:
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if date < "20250429" else [])]
    new_text, more = ("", _INSERTED) if date >= "20250728" else ("; of insert: the text", {})
    schema = _file_commands("Absolute path of a file or a folder.", commands, new_text, **more)
    schema["required"] = ["command", "path"]
    max_characters = tool.get("max_characters")
    limit = f" It shows at most {max_characters} characters of a file." if isinstance(max_characters, int) else ""
    return f"Shows, creates and edits files.{limit}", schema


def _memory(tool: Mapping[str, Any], date: str) -> tuple[str, Schema]:
    commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
    moved = {"old_path": _text("Of rename: the path now."), "new_path": _text("Of rename: the path from now on.")}
    schema = _file_commands("Path of a file or a folder below /memories.", commands, "", **_INSERTED, **moved)
    return "Keeps notes in files below /memories, which outlive this conversation.", schema


_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click screenshot cursor_position"
)
_LATER_ACTIONS = "left_mouse_down left_mouse_up scroll hold_key wait triple_click"


def _computer(tool: Mapping[str, Any], date: str) -> tuple[str, Schema]:
    later = date >= "20250124"
    zooms = date >= "20251124" and bool(tool.get("enable_zoom"))
    actions = _ACTIONS.split() + (_LATER_ACTIONS.split() if later else []) + (["zoom"] if zooms else [])
    properties = {
        "action": _text("What to do.", enum=actions),
        "coordinate": _integers("x and y in pixels from the left and the top, of the end of a drag.", 2),
        "text": _text(
            "Of type: the text; of key and hold_key: the keys, as in ctrl+s; else keys that are held meanwhile."
        ),
    }
    if later:
        properties |= {
            "start_coordinate": _integers("x and y of the start of a drag.", 2),
            "scroll_direction": _text("Of scroll.", enum=["up", "down", "left", "right"]),
            "scroll_amount": {"type": "integer", "description": "Of scroll: clicks of the wheel."},
            "duration": {"type": "number", "description": "Of wait and hold_key: seconds."},
        }
    if zooms:
        properties["region"] = _integers("Of zoom: x and y of its top left and of its bottom right corner.", 4)
    width, height = tool.get("display_width_px"), tool.get("display_height_px")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in (width, height)):
        raise ValueError(
            f"{tool['type']} must have display_width_px and display_height_px, got {width!r} and {height!r}"
        )
    return (
        f"Looks at a screen of {width} x {height} pixels, and works its mouse and keyboard.",
        _object(["action"], **properties),
    )


_FUNCTIONS = {
    "bash": ("bash", _bash, ("20241022", "20250124")),
    "text_editor": ("str_replace_editor", _text_editor, ("20241022", "20250124", "20250429", "20250728")),
    "computer": ("computer", _computer, ("20241022", "20250124", "20251124")),
    "memory": ("memory", _memory, ("20250818",)),
}
"""By family: the default name, the function that describes the tool, and the supported dates."""


def describe_tools(data: dict[str, Any]) -> bool:
    """Replace each typed tool of a Messages request by a function; return whether there was one.

    Raises:
        ValueError: a tool that Anthropic's servers run, or of an unknown type.
    """
    changed = False
    for holder, key in _places(data):
        described = _describe(holder[key])
        changed |= described is not holder[key]
        holder[key] = described
    return changed


def _places(data: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the location (container, key) of every tool: in the request's list, and in turns that add one."""
    tools = data.get("tools")
    if isinstance(tools, list):
        yield from ((tools, index) for index, tool in enumerate(tools) if isinstance(tool, dict))
    for turn in _dicts(data.get("messages")):
        for block in _dicts(turn.get("content")):
            change = block.get("tool") if block.get("type") == "tool_addition" else None
            if isinstance(change, dict) and isinstance(change.get("definition"), dict):
                yield change, "definition"


def _dicts(values: Any) -> Iterator[dict[str, Any]]:
    return (value for value in (values if isinstance(values, list) else ()) if isinstance(value, dict))


def _describe(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind in (None, "custom", "function") or not isinstance(kind, str) or "input_schema" in tool:
        return tool
    dated = _DATED.fullmatch(kind)
    family, date = (dated["family"], dated["date"]) if dated else (kind, "")
    name, describe, dates = _FUNCTIONS.get(family, ("", None, ()))
    if describe is None or date not in dates:
        remedy = _REMEDIES.get(family)
        supported = ", ".join(f"{other}_{day}" for other, (_, _, days) in _FUNCTIONS.items() for day in days)
        raise ValueError(
            f"the tool {kind[:80]!r} is run by Anthropic's servers, and not here: {remedy}"
            if remedy
            else f"tools must be functions or of a type that is known here ({supported}), got {kind[:80]!r}: {_CLIENT}"
        )
    if family == "text_editor" and date >= "20250429":
        name = "str_replace_based_edit_tool"
    description, schema = describe(tool, date)
    passed = {key: tool[key] for key in _PASSED if tool.get(key) is not None}
    return {"name": tool.get("name") or name, "description": description, "input_schema": schema, **passed}
