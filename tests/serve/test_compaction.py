"""Compaction in each API's own shape: what is asked for, what is left out, and the block that the client gets and sends back."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from ctxwin_server.compaction import (
    MESSAGES,
    RESPONSES,
    CompactEdit,
    Compaction,
    encode_event,
    read_summary,
    replace_turns,
    request_for,
    resume,
    take_compaction,
)
from ctxwin_server.request_options import ReportingSend, RequestOptions

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


@pytest.mark.parametrize("bad", ["other", "ctxwin:###", "ctxwin:" + "//79", None])
def test_a_block_that_is_not_ours_is_refused(bad: Any) -> None:
    data = {"input": [{"type": "compaction", "encrypted_content": bad}]}
    with pytest.raises(ValueError, match="one that this server gave"):
        resume(RESPONSES, data)
    with pytest.raises(ValueError, match="its summary or null"):
        resume(MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "compaction", "content": 7}]}]})


def streamed(asked: RequestOptions, events: list[dict[str, Any]], cut: int) -> list[dict[str, Any]]:
    """What a client reads of a stream that comes in pieces of ``cut`` bytes."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        reported = ReportingSend(send, asked)
        head = [(b"content-type", b"text/event-stream")]
        await reported({"type": "http.response.start", "status": 200, "headers": head})
        raw = b"".join(map(encode_event, events))
        for at in range(0, len(raw), cut):
            await reported({"type": "http.response.body", "body": raw[at : at + cut], "more_body": True})
        await reported({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    asyncio.run(run())
    frames = b"".join(sent).split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    return [json.loads(frame.partition(b"data: ")[2]) for frame in frames[:-2]]


@pytest.mark.parametrize("cut", [7, 100_000])
def test_a_stream_of_messages_begins_with_the_block(cut: int) -> None:
    asked = RequestOptions(
        "", usage={"exact": True}, compaction=Compaction(MESSAGES, "S", {"input_tokens": 40, "output_tokens": 9})
    )
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "two"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    read = streamed(asked, events, cut)
    blocks = [e for e in read if e["type"].startswith("content_block")]
    assert [e["index"] for e in blocks] == [0, 0, 0, 1, 1, 1] and read[0]["message"]["content"] == []
    assert blocks[1]["delta"] == {"type": "compaction_delta", "content": "S"}
    assert read[-2]["usage"]["ctxwin"] == {"exact": True}
    assert [i["type"] for i in read[-2]["usage"]["iterations"]] == ["compaction", "message"]


def test_a_stream_of_responses_begins_with_the_item() -> None:
    asked = RequestOptions("", compaction=Compaction(RESPONSES, "S"))
    item = {"type": "message", "role": "assistant", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "sequence_number": 0, "response": {"status": "in_progress", "output": []}},
        {"type": "response.in_progress", "sequence_number": 1, "response": {"status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0, "item": item},
        {"type": "response.output_item.done", "sequence_number": 3, "output_index": 0, "item": item},
        {"type": "response.completed", "sequence_number": 4, "response": answer(RESPONSES)},
    ]
    read = streamed(asked, events, 50)
    assert [e["sequence_number"] for e in read] == list(range(7))
    assert [e["output_index"] for e in read if "output_index" in e] == [0, 0, 1, 1]
    assert [i["type"] for i in read[-1]["response"]["output"]] == ["compaction", "message"]
    assert read[2]["item"] == read[3]["item"] == read[-1]["response"]["output"][0]
