"""Compaction in each API's own shape: what is asked for, what is left out, and the block that the client gets and sends back."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ctxwin_chats.compaction import (
    MESSAGES,
    RESPONSES,
    CompactEdit,
    Compaction,
    read_summary,
    replace_turns,
    request_for,
    resume,
    take_compaction,
)

COMPACT = CompactEdit(type="compact_20260112")
PATHS = [MESSAGES, RESPONSES]


def conversation(path: str) -> dict[str, Any]:
    turns: list[Any] = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]
    if path == MESSAGES:
        return {"model": "m", "max_tokens": 64, "system": "Rules.", "messages": turns, "stop_sequences": ["x"]}
    return {"model": "m", "max_output_tokens": 64, "input": [{"role": "developer", "content": "Rules."}, *turns]}


def turns(data: dict[str, Any]) -> list[Any]:
    return list(data.get("messages") or data["input"])


def texts(data: dict[str, Any]) -> list[str]:
    found = []
    for turn in turns(data):
        content = turn["content"]
        found += [content] if isinstance(content, str) else [part["text"] for part in content]
    return found


def answer(path: str) -> dict[str, Any]:
    if path == MESSAGES:
        return {
            "type": "message",
            "content": [{"type": "text", "text": "two"}],
            "usage": {"input_tokens": 30, "output_tokens": 5},
        }
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]}
    return {"status": "completed", "output": [message], "usage": {"input_tokens": 30, "output_tokens": 5}}


def test_each_api_asks_in_its_own_words() -> None:
    edits = [{"type": "clear_images"}, {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 7}}]
    data: dict[str, Any] = {"context_management": {"edits": edits}}
    compact = take_compaction(MESSAGES, data)
    assert compact is not None and compact.threshold == 7 and data == {"context_management": {"edits": edits[:1]}}
    data = {"context_management": [{"type": "compaction", "compact_threshold": 9}]}
    compact = take_compaction(RESPONSES, data)
    assert compact is not None and compact.threshold == 9 and data == {}
    assert (
        take_compaction(MESSAGES, {}) is None
        and take_compaction(MESSAGES, {"context_management": {"edits": []}}) is None
    )
    assert COMPACT.threshold == 150_000
    for path, bad in (
        (MESSAGES, {"edits": [{"type": "compact_20260112", "keep": 1}]}),
        (RESPONSES, [{"type": "other"}]),
    ):
        with pytest.raises(ValueError, match=r"malformed|an entry of context_management must be"):
            take_compaction(path, {"context_management": bad})


@pytest.mark.parametrize("path", PATHS)
def test_a_summary_is_asked_for_behind_the_same_conversation(path: str) -> None:
    data = {**conversation(path), "tools": [{"name": "look"}], "stream": True}
    before = copy.deepcopy(data)
    body = request_for(path, data, COMPACT, 100)
    assert data == before and texts(body)[:-1] == texts(data) and "Summarise" in texts(body)[-1]
    assert [t["role"] for t in turns(body)] == [t["role"] for t in turns(data)]  # no two turns of a user's in a row
    assert body["stream"] is False and 100 in (body.get("max_tokens"), body.get("max_output_tokens"))
    assert body["tool_choice"] in ("none", {"type": "none"}) and "stop_sequences" not in body
    own = CompactEdit(type="compact_20260112", instructions="Only names.")
    assert texts(request_for(path, data, own, 100))[-1] == "Only names."
    assert read_summary(path, answer(path)) == ("two", {"input_tokens": 30, "output_tokens": 5})
    assert read_summary(path, {"content": [], "output": []}) == (None, {})


@pytest.mark.parametrize("path", PATHS)
def test_the_summary_takes_the_place_of_all_but_rules_and_the_last_turn(path: str) -> None:
    data = conversation(path)
    replace_turns(path, data, "S")
    assert texts(data)[-2:] == ["Summary of the conversation so far:\n\nS", "second"]
    assert [t["role"] for t in turns(data)] == ["developer", "user"][-len(turns(data)) :]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}
    data = {"messages": [*conversation(MESSAGES)["messages"], result]}
    replace_turns(MESSAGES, data, "S")  # the call that it answers is gone
    assert texts(data) == ["Summary of the conversation so far:\n\nS"]
    said = {"role": "user", "content": [*result["content"], {"type": "text", "text": "stop"}]}
    data = {"messages": [*conversation(MESSAGES)["messages"], said]}
    replace_turns(MESSAGES, data, "S")  # what the user says beside the result is the task
    assert texts(data) == ["Summary of the conversation so far:\n\nS", "stop"]


@pytest.mark.parametrize("path", PATHS)
def test_the_client_sends_the_block_back_and_what_was_in_front_is_left_out(path: str) -> None:
    done = Compaction(path, "S", {"input_tokens": 40, "output_tokens": 9, "cache_read_input_tokens": 7})
    made = answer(path)
    made["usage"]["cache_read_input_tokens"] = 12
    done.add_to(made)
    data = conversation(path)
    if path == MESSAGES:
        assert made["content"][0] == {"type": "compaction", "content": "S"}
        assert [i["type"] for i in made["usage"]["iterations"]] == ["compaction", "message"]
        assert made["usage"]["iterations"][0]["input_tokens"] == 40
        assert [i["cache_read_input_tokens"] for i in made["usage"]["iterations"]] == [7, 12]
        data["messages"] += [{"role": "assistant", "content": made["content"]}, {"role": "user", "content": "third"}]
    else:
        data["input"] += [*made["output"], {"role": "user", "content": "third"}]
    assert resume(path, data)
    assert texts(data)[-3:] == ["Summary of the conversation so far:\n\nS", "two", "third"]
    assert not resume(path, data) and "first" not in json.dumps(data)
    rules = [t["content"] for t in turns(data) if t["role"] == "developer"]
    assert rules == ([] if path == MESSAGES else ["Rules."])


def test_a_compaction_that_failed_leaves_nothing_out() -> None:
    data = conversation(MESSAGES)
    content = [{"type": "compaction", "content": None}, {"type": "text", "text": "two"}]
    data["messages"].append({"role": "assistant", "content": content})
    assert resume(MESSAGES, data) and texts(data) == ["first", "one", "second", "two"]


@pytest.mark.parametrize("path", PATHS)
def test_a_compaction_that_failed_later_leaves_the_earlier_summary(path: str) -> None:
    data = conversation(path)
    for summary, words in (("S", "two"), (None, "three")):
        made = answer(path)
        Compaction(path, summary, {}).add_to(made)
        sent = json.loads(json.dumps(made).replace('"two"', f'"{words}"'))
        new = [{"role": "assistant", "content": sent["content"]}] if path == MESSAGES else sent["output"]
        data["messages" if path == MESSAGES else "input"] += [*new, {"role": "user", "content": f"behind {words}"}]
    assert resume(path, data)
    assert texts(data)[-5:] == [
        "Summary of the conversation so far:\n\nS",
        "two",
        "behind two",
        "three",
        "behind three",
    ]


def test_a_failed_compaction_in_the_turn_of_an_earlier_one_leaves_its_summary() -> None:
    """Clients may join a paused answer with the next one."""
    blocks = [{"type": "compaction", "content": "S"}, {"type": "text", "text": "two"}]
    blocks += [{"type": "compaction", "content": None}, {"type": "text", "text": "three"}]
    data = conversation(MESSAGES)
    data["messages"] += [{"role": "assistant", "content": blocks}, {"role": "user", "content": "last"}]
    assert resume(MESSAGES, data)
    assert texts(data) == ["Summary of the conversation so far:\n\nS", "two", "three", "last"]


@pytest.mark.parametrize("path", PATHS)
def test_a_summary_alone_and_the_next_question_are_one_turn(path: str) -> None:
    """Templates that want roles to alternate refuse two of the user's in a row."""
    data, made = conversation(path), answer(path)
    Compaction(path, "S", {}).add_to(made)
    alone = [{"role": "assistant", "content": made["content"][:1]}] if path == MESSAGES else made["output"][:1]
    data["messages" if path == MESSAGES else "input"] += [*alone, {"role": "user", "content": "third"}]
    assert resume(path, data)
    assert texts(data)[-2:] == ["Summary of the conversation so far:\n\nS", "third"]
    assert [turn["role"] for turn in turns(data)] == (["user"] if path == MESSAGES else ["developer", "user"])


@pytest.mark.parametrize("bad", ["other", "ctxwin:###", "ctxwin:" + "//79", None])
def test_a_block_that_is_not_ours_is_refused(bad: Any) -> None:
    data = {"input": [{"type": "compaction", "encrypted_content": bad}]}
    with pytest.raises(ValueError, match="one that this server gave"):
        resume(RESPONSES, data)
    with pytest.raises(ValueError, match="its summary or null"):
        resume(MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "compaction", "content": 7}]}]})
