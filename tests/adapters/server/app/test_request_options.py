"""The report of a plain request in its answer: a stream begins with the block of a compaction."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ctxwin_chats.compaction import MESSAGES, RESPONSES, Compaction, encode_event
from ctxwin_server.app.request_options import ReportingSend, RequestOptions


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
        usage={"exact": True}, compaction=Compaction(MESSAGES, "S", {"input_tokens": 40, "output_tokens": 9})
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
    asked = RequestOptions(compaction=Compaction(RESPONSES, "S"))
    item = {"type": "message", "role": "assistant", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "sequence_number": 0, "response": {"status": "in_progress", "output": []}},
        {"type": "response.in_progress", "sequence_number": 1, "response": {"status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0, "item": item},
        {"type": "response.output_item.done", "sequence_number": 3, "output_index": 0, "item": item},
        {"type": "response.completed", "sequence_number": 4, "response": {"output": [item]}},
    ]
    read = streamed(asked, events, 50)
    assert [e["sequence_number"] for e in read] == list(range(7))
    assert [e["output_index"] for e in read if "output_index" in e] == [0, 0, 1, 1]
    assert [i["type"] for i in read[-1]["response"]["output"]] == ["compaction", "message"]
    assert read[2]["item"] == read[3]["item"] == read[-1]["response"]["output"][0]
