"""Windows behind plain chats, held against the same requests without them; on vLLM's own command with our plugin."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from anthropic import Anthropic
from openai import APIStatusError, AuthenticationError, BadRequestError

from ctxwin import Chunk, Fidelity
from ctxwin.adapters.openai import LiveStream, RemoteWindow, chunk_part, upload
from ctxwin.engines.open import vllm_installed
from ctxwin.serve.errors import UnknownWindow
from ctxwin.tiny import world
from serve.test_vllm_server import FRAMES, HEADER, Process, cached, plain_messages, question

pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")

STOCK = True
EXACT = {"windows": "auto", "fidelity": {"mode": "exact"}}
OFF = {"windows": "off"}
TOOL: Any = {"type": "function", "function": {"name": "click", "parameters": {"enum": ["left", "right"]}}}


@pytest.fixture
def server(vllm_server: Process) -> Process:
    return vllm_server


def create(server: Process, behind: dict[str, Any], salt: str, key: str = "key-own", **options: Any) -> Any:
    """A chat in a prefix-cache space of its own, so that no other test's KV is found."""
    extra = {**options.pop("extra_body", {}), "ctxwin": behind, **({"cache_salt": salt} if salt else {})}
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0, **options}
    return server.client(key).chat.completions.create(**asked, extra_body=extra)


def reported(answer: Any) -> dict[str, Any]:
    return dict((answer.usage.model_extra or {})["ctxwin"])


def sliding(server: Process, behind: dict[str, Any], salt: str, **options: Any) -> list[Any]:
    """Asks about four frames, slid by one each time, and once back again."""
    shown = [[i % 8 for i in range(k, k + 4)] for k in (0, 1, 2, 3, 2)]
    return [create(server, behind, salt, messages=plain_messages(s, question(s[2])), **options) for s in shown]


def test_exact_windows_answer_what_vllm_answers_and_a_profile_computes_less(server: Process) -> None:
    alone = sliding(server, OFF, "alone")
    exact = sliding(server, EXACT, "exact", user="exact")
    assert [a.choices[0].message.content for a in exact] == [a.choices[0].message.content for a in alone]
    assert all(reported(a)["exact"] for a in exact)
    fast = sliding(server, {"windows": "auto", "fidelity": {"mode": "patched", "rank": 11}}, "fast", user="fast")
    for asked in (exact, fast):
        for answer in asked:
            told = reported(answer)
            assert sum(told["lanes"].values()) == answer.usage.prompt_tokens
            assert told["computed_tokens"] == answer.usage.prompt_tokens - cached(answer)
    assert reported(exact[4])["computed_tokens"] < 0.4 * exact[4].usage.prompt_tokens  # it stood like that before
    computed = sum(reported(a)["computed_tokens"] for a in fast[1:])
    assert computed < 0.4 * sum(a.usage.prompt_tokens for a in fast[1:])
    assert reported(fast[1])["lanes"]["survivor"] > 0 and "windows" not in str(alone[0].usage)


@pytest.mark.parametrize("fidelity", [Fidelity("exact"), Fidelity("patched", rank=11)])
def test_a_live_stream_leaves_only_the_question_to_an_answer(server: Process, fidelity: Fidelity) -> None:
    client, salt = server.client("key-acme"), fidelity.mode
    with (
        RemoteWindow(client, HEADER, 450, fidelity) as pushed,
        RemoteWindow(client, HEADER, 450, fidelity) as held,
        LiveStream(client, pushed.id, reserve_tokens=40) as live,
    ):
        for i, frame in enumerate(FRAMES):
            pixels = np.asarray(world.render(frame))
            live.push(pixels, f"{salt} {i}", time=i)
            answer = live.ask(question(i), 4)
            usage = answer.usage
            asked = usage.prompt_tokens - pushed.tokens
            assert usage.vision_encodes == 0
            assert usage.computed_tokens < asked + 32  # vLLM's cache ends with a whole block
            assert usage.cached_tokens > pushed.tokens - 32  # the slide was paid on arrival
            held.append(Chunk.image(pixels, text=f"{salt} {i}"))
            held.slide(reserve_tokens=40)
            assert held.ask(question(i), 4).token_ids == answer.token_ids
        assert len(pushed.evicted) == len(held.evicted) > 0
        with pytest.raises(UnknownWindow), LiveStream(server.client("key-bolt"), pushed.id):
            pass


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": True, "top_logprobs": 3},
        {"n": 3, "seed": 5, "temperature": 1.0},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "click"}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": ["crimson", "navy"]}},
            }
        },
        {"stop": ["e"], "max_tokens": 16},
        {"extra_body": {"repetition_penalty": 1.8, "min_tokens": 4}},
    ],
)
def test_everything_else_about_a_request_is_vllms_own(server: Process, options: dict[str, Any]) -> None:
    def essence(answer: Any) -> Any:
        shown = answer.model_dump()["choices"]
        for choice in shown:
            for call in choice["message"].get("tool_calls") or ():
                call.pop("id")
            for token in (choice["logprobs"] or {"content": ()})["content"]:
                token["logprob"] = round(token["logprob"], 3)
                token["top_logprobs"] = [(t["token"], round(t["logprob"], 3)) for t in token["top_logprobs"]]
        return shown

    messages = plain_messages([0, 1, 2], question(1))
    create(server, EXACT, "warm", messages=plain_messages([0, 1], question(1)))
    with_window = create(server, EXACT, "warm", messages=messages, **options)
    assert essence(with_window) == essence(create(server, OFF, "cold", messages=messages, **options))
    assert reported(with_window)["computed_tokens"] < with_window.usage.prompt_tokens


def test_a_stream_is_vllms_and_ends_with_the_lanes(server: Process) -> None:
    messages = plain_messages([3, 4], question(3))
    options: dict[str, Any] = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    alone, behind = (list(create(server, how, "stream" + str(how), **options)) for how in (OFF, EXACT))
    texts = [[e.choices[0].delta.content for e in events if e.choices] for events in (alone, behind)]
    assert texts[0] == texts[1]
    assert reported(behind[-1])["lanes"] and "ctxwin" not in (alone[-1].usage.model_extra or {})


def test_responses_and_messages_have_windows_too(server: Process) -> None:
    (_, user) = plain_messages([5], question(5))
    url, text = user["content"][1]["image_url"]["url"], question(5)
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {
            "input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": text},
            ]}],
            "max_output_tokens": 6,
        },
        "/v1/messages": {
            "system": HEADER, "max_tokens": 6,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text}]}],
        },
    }  # fmt: skip

    def post(path: str, behind: dict[str, Any]) -> tuple[Any, Any, Any]:
        body = {"model": "tiny", "temperature": 0, "ctxwin": behind, "cache_salt": f"{path}{behind}", **bodies[path]}
        head = {"Content-Type": "application/json", "Authorization": "Bearer key-own", "X-Session-Id": "one"}
        request = urllib.request.Request(server.url + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.loads(answer.read())
            shown = told.get("content") or [part.get("content") for part in told["output"]]
            for part in shown[0] if isinstance(shown[0], list) else shown:
                part.pop("id", None)
            return shown, told["usage"], answer.headers.get("x-ctxwin-windows")

    for path in bodies:
        alone, _, said = post(path, OFF)
        behind, usage, told = post(path, EXACT)
        assert behind == alone and said is None and told == "auto", path
        again = post(path, EXACT)[1]
        assert again["ctxwin"]["computed_tokens"] < usage["ctxwin"]["computed_tokens"], path


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_conversation_is_compacted_and_goes_on(server: Process, stream: bool) -> None:
    """By Anthropic's own client, which reads the block and sends it back."""
    client = Anthropic(base_url=server.url, auth_token="key-own")
    turns: list[Any] = [{"role": "user", "content": f"t={i} s " * 20} for i in range(3)]
    turns = [turns[0], {"role": "assistant", "content": "crimson"}, turns[1]]
    edit: Any = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 10}}

    def ask(turns: list[Any], **fields: Any) -> Any:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "system": HEADER, "messages": turns, **fields}
        extra = {"ctxwin": EXACT, "cache_salt": f"compact {stream}", "temperature": 0}
        if stream:
            with client.beta.messages.stream(**asked, extra_body=extra) as events:
                return events.get_final_message()
        return client.beta.messages.create(**asked, extra_body=extra)

    made = ask(turns, context_management={"edits": [edit]})
    block, *rest = made.content
    assert block.type == "compaction" and block.content and [part.type for part in rest] == ["text"]
    paused = ask(turns, context_management={"edits": [{**edit, "pause_after_compaction": True}]})
    assert paused.stop_reason == "compaction" and [b.content for b in paused.content] == [block.content]
    turns += [{"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in made.content]}]
    turns += [{"role": "user", "content": question(0)}]
    long, short = ask([t for t in turns if isinstance(t["content"], str)]), ask(turns)
    read = [u.input_tokens + u.cache_read_input_tokens for u in (long.usage, short.usage)]
    assert read[1] < read[0] / 2 and short.content[0].type == "text"


def test_what_cannot_have_a_window_passes_and_says_why(server: Process) -> None:
    client, messages = server.client(), plain_messages([0, 1], question(1))
    named = plain_messages([0], question(0))
    named[1]["content"][1]["uuid"] = "mine"
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4}
    for body, why in [
        ({"messages": messages, "extra_body": {"prompt_logprobs": 1}}, "off; log-probabilities"),
        ({"messages": named}, "off; media are named"),
        ({"messages": messages}, "auto"),
    ]:
        head = {"x-ctxwin-windows": "auto"}
        raw = client.chat.completions.with_raw_response.create(**asked, **body, extra_headers=head)
        assert raw.headers["x-ctxwin-windows"].startswith(why) and raw.parse().choices[0].message.content
    assert (
        "x-ctxwin-windows" not in client.chat.completions.with_raw_response.create(**asked, messages=messages).headers
    )
    wrongs: list[Any] = [{"windows": "maybe"}, {"of": 1}, 7, {"fidelity": {"mode": "best"}}]
    for bad in wrongs:
        with pytest.raises(BadRequestError, match=r"must be|fidelity|mode"):
            create(server, bad, "", messages=messages)
    with pytest.raises(APIStatusError):
        create(server, EXACT, "", messages=messages, extra_body={"kv_transfer_params": {"ctxwin": "0" * 32}})


def test_tenants_share_no_conversation_and_no_kv(server: Process) -> None:
    messages = plain_messages([6, 7], question(6))
    for key in ("key-acme", "key-bolt"):
        first = create(server, EXACT, "same", key, messages=messages, user="same")
        assert reported(first)["computed_tokens"] == first.usage.prompt_tokens
        assert reported(create(server, EXACT, "same", key, messages=messages, user="same"))["computed_tokens"] < 40


def test_many_conversations_at_once_are_exact(server: Process) -> None:
    """By content alone, some of them the same, exact beside approximate."""

    def converse(j: int) -> list[tuple[str, str]]:
        found = []
        for k in range(3):
            shown = [(j // 2 + k + i) % 8 for i in range(3)]
            messages = plain_messages(shown, question(shown[1]))
            alone = create(server, OFF, "", messages=messages).choices[0].message.content
            behind = create(server, EXACT, "", messages=messages).choices[0].message.content
            create(server, {"windows": "auto"}, "", messages=messages)
            found.append((alone, behind))
        return found

    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(converse, range(len(FRAMES))):
            assert all(alone == behind for alone, behind in found)
    assert not server.metrics().get('ctxwin_chats_total{behind="failed",tenant=""}')


def test_the_plugin_serves_all_that_our_command_does(server: Process) -> None:
    """Uploads, windows, chats that name chunks, keys and metrics; the rest of this file asks for windows behind chats."""
    client = server.client("key-acme")
    seen = Chunk.image(world.render(FRAMES[0]), text="t=0 s")
    chunk = upload(client, seen)
    window = RemoteWindow(client, system_prompt=HEADER, budget=600)
    window.append(seen)
    asked = window.ask(question(0), max_tokens=4)
    parts: list[Any] = [chunk_part(chunk), {"type": "text", "text": question(0)}]
    messages: list[Any] = [{"role": "system", "content": HEADER}, {"role": "user", "content": parts}]
    named = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
    assert named.choices[0].message.content == asked.text and asked.text
    with pytest.raises(AuthenticationError):
        server.client("nobody's").models.list()
    with pytest.raises(APIStatusError) as other:
        server.client("key-bolt").get(f"/windows/{window.id}", cast_to=object)
    assert other.value.status_code == 404
    assert server.metrics()['ctxwin_asks_total{tenant="acme"}'] >= 2
