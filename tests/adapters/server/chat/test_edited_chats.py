"""Histories that a client edits in front of what it keeps: answered at once, by one request each, and as vLLM alone answers."""

from __future__ import annotations

import base64
import copy
import http.client
import io
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from adapters.server.vllm.processes import Process
from adapters.server.vllm.program import FRAMES, HEADER, question
from ctxwin.tiny import world
from ctxwin_chats.context_management import manage

pytestmark = pytest.mark.vllm

STALLED_S = 20.0
"""Ten times what the slowest of these requests takes on a busy machine; a capture that never came took 120."""
KEY = {"Authorization": "Bearer key-own"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
EXACT, OFF = {"windows": "auto", "fidelity": {"mode": "exact"}}, {"windows": "off"}
_PROMPT = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
"""What a prompt's tokens are called; Anthropic's counts leave one another out."""
History = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def server(vllm_server: Process) -> Process:
    return vllm_server


@cache
def png(i: int, seed: int = 0) -> str:
    """Frame ``i``, as base64; another ``seed`` is another picture that looks the same."""
    pixels = np.asarray(world.render(FRAMES[i])).copy()
    pixels[0, 0] = (seed % 256, seed // 256, 7)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def picture(i: int, seed: int = 0) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(i, seed)}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def system(words: str = HEADER) -> dict[str, Any]:
    return {"role": "system", "content": words}


def assistant(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


def chat(*messages: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": list(messages), "max_tokens": 6, **fields}


def reordered_pictures() -> History:
    return [chat(system(), user(*map(picture, order), question(1))) for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0])]


def screenshot_replaced_by_text() -> History:
    turns = [user(f"step {i}", picture(i)) for i in range(4)]
    later = [user("step 0", "[a screenshot]"), *turns[1:]]
    return [chat(system(), *kept, user(question(3))) for kept in (turns, later, turns)]


def oldest_turns_dropped() -> History:
    turns = [m for i in range(6) for m in (user(f"step {i}", picture(i)), assistant("crimson"))]
    return [chat(system(), *turns[2 * k :], user(question(5))) for k in (0, 1, 3)]


def tool_results_swapped() -> History:
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": {i}}}'}}
        for i in range(2)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call{i}", "content": [text(f"seen {i}"), picture(i)]} for i in range(2)
    ]
    asked = [system(), user("look"), {"role": "assistant", "content": "", "tool_calls": calls}]
    return [chat(*asked, *order, user(question(1))) for order in (results, results[::-1])]


def system_prompt_that_tells_the_time() -> History:
    turns = [user(picture(0)), assistant("navy"), user(picture(1))]
    return [chat(system(f"{HEADER} It is 12:0{i}."), *turns, user(question(i % 2))) for i in (0, 1, 0, 1)]


def developer_message_added() -> History:
    turns = [user(picture(0)), assistant("navy"), user(picture(1))]
    return [
        chat(system(), *turns, user(question(1))),
        chat(system(), {"role": "developer", "content": "Be brief."}, *turns, user(question(1))),
    ]


def images_cleared() -> History:
    turns = [user(f"step {i}", picture(i)) for i in range(4)]
    edits = {"edits": [{"type": "clear_images", "keep": {"type": "images", "value": 2}}]}
    return [chat(system(), *turns[:n], user(question(1)), context_management=edits) for n in (2, 3, 4)]


def tool_uses_cleared() -> History:
    messages: list[Any] = [{"role": "user", "content": "look around"}]
    found: History = []
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 10},
        "keep": {"type": "tool_uses", "value": 2},
    }
    for i in range(5):
        source = {"type": "base64", "media_type": "image/png", "data": png(i)}
        seen = [{"type": "text", "text": f"seen {i}"}, {"type": "image", "source": source}]
        messages += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{i}", "name": "look", "input": {"at": i}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{i}", "content": seen}]},
        ]
        body = {"messages": copy.deepcopy(messages), "system": HEADER, "context_management": {"edits": [edit]}}
        found.append((MESSAGES, {**body, "max_tokens": 6}))
    return found


def compacted() -> History:
    turns = [m for i in range(3) for m in (user(f"t={i} s " * 9), assistant("navy"))]
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 150}}
    return [
        (
            MESSAGES,
            {
                "system": HEADER,
                "messages": [*turns[:n], user(question(0))],
                "max_tokens": 6,
                "context_management": {"edits": [edit]},
            },
        )
        for n in (2, 4, 6)
    ]


def system_prompt_in_blocks() -> History:
    source = {"type": "base64", "media_type": "image/png", "data": png(2)}
    cached = {"cache_control": {"type": "ephemeral"}}
    asked = [{"role": "user", "content": [{"type": "image", "source": source, **cached}, text(question(2))]}]
    blocks = [[text(HEADER), {**text(f"Rule {i}."), **cached}] for i in range(3)]
    return [(MESSAGES, {"system": some, "messages": asked, "max_tokens": 6}) for some in blocks]


def responses_function_output_with_a_picture() -> History:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "look"}]}]
    found: History = []
    for i in range(3):
        url = f"data:image/png;base64,{png(i)}"
        output = [
            {"type": "input_text", "text": f"seen {i}"},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ]
        items += [
            {"type": "function_call", "call_id": f"c{i}", "name": "look", "arguments": f'{{"at": {i}}}'},
            {"type": "function_call_output", "call_id": f"c{i}", "output": output},
        ]
        found.append((RESPONSES, {"input": [*items[-4:]], "instructions": HEADER, "max_output_tokens": 6}))
    return found


def pictures_repeated() -> History:
    orders = ([0, 1], [0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0])
    return [chat(system(), user(*map(picture, order), question(1)), n=2, temperature=1.0, seed=3) for order in orders]


def many_at_once_in_front() -> History:
    return [chat(system(), user(*map(picture, order), question(0))) for order in ([0], [5, 4, 3, 2, 1, 0], [0])]


HISTORIES = [
    reordered_pictures, screenshot_replaced_by_text, oldest_turns_dropped, tool_results_swapped,
    system_prompt_that_tells_the_time, developer_message_added, images_cleared, tool_uses_cleared, compacted,
    system_prompt_in_blocks, responses_function_output_with_a_picture, pictures_repeated, many_at_once_in_front,
]  # fmt: skip


def ask(server: Process, path: str, body: dict[str, Any], **fields: Any) -> httpx.Response:
    asked = {"model": "tiny", "temperature": 0, "ctxwin": {"windows": "auto"}, **body, **fields}
    return httpx.post(server.url + path, json=asked, headers={**KEY, "x-session-id": "edited"}, timeout=STALLED_S)


def words(answer: httpx.Response) -> Any:
    """What was said, without ids."""
    assert answer.status_code == 200, answer.text
    data = answer.json()
    if "choices" in data:
        return [choice["message"]["content"] for choice in data["choices"]]
    return [[p.get("text") for p in part.get("content") or [part]] for part in data.get("output") or data["content"]]


def counted(server: Process) -> dict[str, float]:
    names = {"window", "none", "failed"}
    found = server.metrics()
    return {name: found.get(f'ctxwin_chats_total{{behind="{name}",tenant=""}}', 0.0) for name in names}


@pytest.mark.parametrize("history", HISTORIES, ids=lambda made: made.__name__)
def test_an_edited_history_is_answered_at_once_and_by_one_request_each(
    server: Process, history: Callable[[], History]
) -> None:
    before, requests = counted(server), history()
    extra = history is compacted
    for path, body in requests:
        answer = ask(server, path, body, cache_salt=history.__name__)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ctxwin-windows"] == "auto"
        used = answer.json()["usage"]
        asked = sum(used.get(name) or 0 for name in _PROMPT)
        assert sum(used["ctxwin"]["lanes"].values()) == asked or extra  # of this request, not of one inside
        assert 0 < used["ctxwin"]["computed_tokens"] <= asked or extra
    now = counted(server)
    summaries = now["window"] - before["window"] - len(requests)
    assert summaries == 0 or (extra and 0 < summaries <= len(requests))
    assert now["failed"] == before["failed"] and now["none"] == before["none"]


@pytest.mark.parametrize(
    "history", [made for made in HISTORIES if made is not compacted], ids=lambda made: made.__name__
)
def test_in_exact_mode_an_edited_history_is_answered_as_vllm_answers(
    server: Process, history: Callable[[], History]
) -> None:
    for path, body in history():
        exact = ask(server, path, body, cache_salt=f"exact {history.__name__}", ctxwin=EXACT)
        left = copy.deepcopy(body)
        manage(left, None, lambda part: len(str(part)))
        alone = ask(server, path, left, cache_salt=f"off {history.__name__}", ctxwin=OFF)
        assert words(exact) == words(alone)
        assert exact.headers["x-ctxwin-windows"] == "auto" and exact.json()["usage"]["ctxwin"]["exact"]


def logprobs(answer: httpx.Response) -> list[tuple[str, float]]:
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["choices"][0]["logprobs"]["content"]
    return [(top["token"], top["logprob"]) for token in tokens for top in token["top_logprobs"]]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_behind_a_reordered_history_are_vllms(server: Process, stream: bool) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 4}
    for path, body in reordered_pictures():
        if stream:  # the same tokens, one by one, on the way to what the next turn's window is built from
            streamed = ask(server, path, body, cache_salt="top", ctxwin=EXACT, stream=True)
            assert streamed.text.endswith("data: [DONE]\n\n")
        exact = ask(server, path, body, cache_salt="top", ctxwin=EXACT, **fields)
        alone = ask(server, path, body, cache_salt="top off", ctxwin=OFF, **fields)
        for (token, value), (expected, want) in zip(logprobs(exact), logprobs(alone), strict=True):
            assert token == expected and value == pytest.approx(want, abs=1e-3)


WINDOWS = pytest.mark.parametrize("behind", [{"windows": "auto"}, OFF], ids=["auto", "off"])


@WINDOWS
@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"max_tokens": 10**6}, {"bad_words": [""]}, {"logit_bias": {"999999": 1}}]
)
def test_a_request_that_is_refused_once_it_is_rendered_takes_no_picture_along(
    server: Process, behind: dict[str, Any], fields: dict[str, Any]
) -> None:
    seen = picture(3, 1000 + len(str([behind, fields])))
    path, body = chat(system(), user(seen, question(3)), ctxwin=behind)
    assert ask(server, path, {**body, **fields}).status_code == 400
    assert ask(server, path, body).status_code == 200


def with_picture(path: str, i: int, seed: int) -> dict[str, Any]:
    """A request of each route, about a picture that no other request has."""
    if path == CHAT:
        return chat(system(), user(picture(i, seed), question(i)))[1]
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": png(i, seed)}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}, text(question(i))]}]
        return {"system": HEADER, "messages": messages, "max_tokens": 6}
    parts = [
        {"type": "input_image", "image_url": picture(i, seed)["image_url"]["url"], "detail": "auto"},
        {"type": "input_text", "text": question(i)},
    ]
    return {"instructions": HEADER, "input": [{"role": "user", "content": parts}], "max_output_tokens": 6}


@WINDOWS
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_client_that_leaves_at_any_time_leaves_nothing_to_the_next(
    server: Process, path: str, behind: dict[str, Any]
) -> None:
    before = counted(server)["failed"]
    for i, wait in enumerate((0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08)):
        body = with_picture(path, i, 2000 + len(path) + 64 * (behind is OFF))
        fields: dict[str, Any] = {"model": "tiny", "temperature": 0, "ctxwin": behind, "stream": bool(i % 2)}
        host, port = server.url.removeprefix("http://").split(":")
        left = http.client.HTTPConnection(host, int(port))
        left.request("POST", path, json.dumps({**body, **fields}), {"Content-Type": "application/json", **KEY})
        time.sleep(wait)
        left.close()
        assert ask(server, path, body, ctxwin=behind).status_code == 200
    assert counted(server)["failed"] == before


def test_clients_that_show_the_same_new_picture_at_once_all_get_answers(server: Process) -> None:
    """Some with a window, which takes its time before the picture reaches the engine, some without."""

    def one(i: int) -> int:
        path = (CHAT, RESPONSES, MESSAGES)[i % 3]
        behind = OFF if i % 2 else {"windows": "auto"}
        return ask(server, path, with_picture(path, i // 6, 3000), ctxwin=behind).status_code

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(one, range(24))) == {200}
