"""Windows behind plain chats, held against the same requests without them; on vLLM's own command with our plugin."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicBadRequest
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError

from adapters.server.vllm.processes import Process
from adapters.server.vllm.program import FRAMES, HEADER, cached, plain_messages, question
from ctxwin import Chunk, Fidelity
from ctxwin.tiny import world
from ctxwin_client import LiveStream, RemoteWindow, chunk_part, upload
from ctxwin_client.errors import UnknownWindow

EXACT = {"windows": "auto", "fidelity": {"mode": "exact"}}
OFF = {"windows": "off"}
TOOL: Any = {"type": "function", "function": {"name": "click", "parameters": {"enum": ["left", "right"]}}}


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
    computed = sum(reported(a)["computed_tokens"] for a in fast[1:])
    assert computed < 0.4 * sum(a.usage.prompt_tokens for a in fast[1:])
    for asked in (exact, fast):
        for answer in asked:
            told = reported(answer)
            assert sum(told["lanes"].values()) == answer.usage.prompt_tokens
            assert told["computed_tokens"] == answer.usage.prompt_tokens - cached(answer)
    assert reported(exact[4])["computed_tokens"] < 0.4 * exact[4].usage.prompt_tokens  # it stood like that before
    assert reported(fast[1])["lanes"]["survivor"] > 0 and "windows" not in str(alone[0].usage)


def test_a_clock_in_the_system_prompt_leaves_a_chat_its_kv(server: Process) -> None:
    """Where the chat allows it: the pictures behind the clock are moved, and the clock itself is computed."""
    few: Any = {"windows": "auto", "fidelity": {"mode": "patched", "survivors": "refresh", "edited_tokens": 16}}

    def told(behind: dict[str, Any], salt: str, minute: int) -> dict[str, Any]:
        system, *others = plain_messages([0, 1, 2, 3], question(1))
        clock = {**system, "content": f"{HEADER} the number is {minute}"}
        return reported(create(server, behind, salt, messages=[clock, *others], user=salt))

    first, second = (told(few, "clock", minute) for minute in (3, 4))
    assert second["lanes"].get("edited", 0) > second["computed_tokens"] and not second["exact"]
    assert "edited" not in first["lanes"]
    assert told(EXACT, "clock exact", 3)["exact"] and "edited" not in told(EXACT, "clock exact", 4)["lanes"]


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
    # vLLM joins what a busy client has not taken yet, so the text is compared, not how it was cut.
    texts = ["".join(e.choices[0].delta.content or "" for e in events if e.choices) for events in (alone, behind)]
    assert texts[0] == texts[1] and texts[0]
    ends = [[e.choices[0].finish_reason for e in events if e.choices][-1] for events in (alone, behind)]
    assert ends[0] == ends[1] is not None
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


@pytest.mark.parametrize("behind", [OFF, EXACT], ids=["off", "auto"])
def test_every_way_of_asking_reports_what_was_not_computed(server: Process, behind: dict[str, Any]) -> None:
    """Also streamed; no switch of vLLM's has to be thrown for it."""
    client, claude = server.client(), Anthropic(base_url=server.url, auth_token="key-own")
    chat: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": plain_messages([0, 1], "?")}
    turn = [{"role": "user", "content": "t=0 s " * 60}]
    ours = {"ctxwin": behind, "cache_salt": f"reported {behind}"}
    client.chat.completions.create(**chat, extra_body=ours)
    claude.messages.create(model="tiny", max_tokens=4, messages=turn, extra_body=ours)  # type: ignore[arg-type]

    asked: Any = {**chat, "stream": True, "stream_options": {"include_usage": True}, "extra_body": ours}
    last = [*client.chat.completions.create(**asked)][-1]
    assert cached(client.chat.completions.create(**chat, extra_body=ours)) == cached(last) > 100

    said: Any = {"model": "tiny", "max_tokens": 4, "messages": turn, "extra_body": {**ours, "temperature": 0}}
    with claude.messages.stream(**said) as events:
        for made in (claude.messages.create(**said), events.get_final_message()):
            whole = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
            assert whole > made.usage.cache_read_input_tokens > 100  # type: ignore[operator]

    asked = {"model": "tiny", "max_output_tokens": 4, "temperature": 0, "input": turn, "extra_body": ours}
    made, *_, done = client.responses.create(**asked), *client.responses.create(**asked, stream=True)
    for usage in (made.usage, done.response.usage):
        assert usage.input_tokens > usage.input_tokens_details.cached_tokens > 100


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


@pytest.mark.parametrize("behind", [OFF, EXACT], ids=["off", "auto"])
def test_what_the_official_clients_can_ask_is_served_or_refused_with_a_remedy(
    server: Process, behind: dict[str, Any]
) -> None:
    claude, client = Anthropic(base_url=server.url, auth_token="key-own", max_retries=0), server.client()
    ours = {"ctxwin": behind, "temperature": 0}
    thought: Any = {"type": "thinking", "thinking": "t=0 s " * 40, "signature": ""}
    turns: Any = [{"role": "user", "content": "t=0 s"}]
    for i in range(2):
        turns += [{"role": "assistant", "content": [thought, {"type": "text", "text": "red"}]}]
        turns += [{"role": "user", "content": f"t={i + 1} s"}]
    asked: Any = {"model": "tiny", "max_tokens": 4, "messages": turns, "extra_body": ours}
    edits: Any = {"edits": [{"type": "clear_thinking_20251015"}]}
    made = claude.beta.messages.create(**asked, context_management=edits)
    [applied] = made.context_management.applied_edits  # type: ignore[union-attr]
    assert applied.type == "clear_thinking_20251015" and applied.cleared_thinking_turns == 1
    assert applied.cleared_input_tokens > 50

    summary = claude.beta.messages.create(**{**asked, "extra_body": {**ours, "compaction": {"type": "summarize"}}})
    assert summary.stop_reason == "compaction" and [b.type for b in summary.content] == ["compaction"]
    blocks: Any = [{"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in summary.content]}]
    counts = [claude.messages.count_tokens(model="tiny", messages=m + turns[-1:]) for m in (turns[:-1], blocks)]
    assert counts[1].input_tokens < counts[0].input_tokens

    screen: Any = {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600}
    typed: list[Any] = [
        screen,
        {"type": "bash_20250124", "name": "bash"},
        {"type": "memory_20250818", "name": "memory"},
    ]
    for (
        tool
    ) in typed:  # the bundled model's template shows no tools, so that all there is to see is that vLLM takes them
        assert claude.beta.messages.create(**{**asked, "messages": turns[:1]}, tools=[tool]).content
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(
        AnthropicBadRequest, match="web_search_20250305' is run by Anthropic's servers, and not here"
    ) as told:
        claude.messages.create(**asked, tools=[search])
    assert told.value.body["type"] == "error" and told.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(AnthropicBadRequest, match="top_k") as told:  # vLLM's own complaint
        claude.messages.create(**{**asked, "extra_body": {"top_k": "many"}})
    assert told.value.body["type"] == "error"  # type: ignore[index]

    with pytest.raises(BadRequestError, match="Send the whole history as input"):
        client.responses.create(model="tiny", input="t=0 s", previous_response_id="resp_1", extra_body=ours)
    for listed in (client.files.list, client.vector_stores.list):
        with pytest.raises(NotFoundError, match="libraries") as missing:
            listed()
        assert missing.value.code == "not_found" and missing.value.type == "not_found_error"


@pytest.mark.parametrize("spelled", ["red <|image_pad|> square", "<|vision_start|><|video_pad|>", "<|im_end|>"])
def test_an_answer_that_spells_marks_is_answered_as_vllm_answers(server: Process, spelled: str) -> None:
    """A client that leaves special tokens in its text sends them back; vLLM reads them, and their turn has no picture."""
    shown, asked = plain_messages([0, 1], question(1)), plain_messages([2], question(2))[1:]
    messages = [*shown, {"role": "assistant", "content": spelled}, *asked]
    answers: list[Any] = []
    for behind in (OFF, EXACT, EXACT):
        try:
            answers.append(create(server, behind, f"spelled {spelled} {behind}", messages=messages, user="spells"))
        except APIStatusError as error:
            answers.append(error)
    alone, *others = (
        answer.status_code if isinstance(answer, APIStatusError) else answer.choices[0].message.content
        for answer in answers
    )
    assert others == [alone, alone]


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
        answer = raw.parse()
        assert raw.headers["x-ctxwin-windows"].startswith(why) and answer.choices[0].message.content
        assert set(answer.usage.model_extra or {}) == ({"ctxwin"} if why == "auto" else set())
    raw = client.chat.completions.with_raw_response.create(**asked, messages=messages)
    assert "x-ctxwin-windows" not in raw.headers and not raw.parse().usage.model_extra
    wrongs: list[Any] = [{"windows": "maybe"}, {"of": 1}, 7, {"fidelity": {"mode": "best"}}]
    for bad in wrongs:
        with pytest.raises(BadRequestError, match=r"must be|fidelity|mode"):
            create(server, bad, "", messages=messages)
    with pytest.raises(APIStatusError):
        create(server, EXACT, "", messages=messages, extra_body={"kv_transfer_params": {"ctxwin": "0" * 32}})


@pytest.mark.parametrize("ending", ["whole", "stop string", "two answers", "one token", "client leaves"])
def test_a_chat_that_vllm_begins_at_once_is_read_back_however_its_answers_end(server: Process, ending: str) -> None:
    options: dict[str, Any] = {"max_tokens": 1 if ending == "one token" else 12}
    options |= {"stop": ["a", "e", " "]} if ending == "stop string" else {}
    options |= {"n": 2, "temperature": 1, "seed": 7} if ending == "two answers" else {}
    messages: list[Any] = [{"role": "system", "content": "You watch a door, and tell what has changed since then."}]
    fallbacks, computed = server.metrics().get('ctxwin_fallbacks_total{tenant=""}'), []
    for turn in range(5):
        messages.append(
            {"role": "user", "content": f"Step {turn}: a light is on, and the door is shut. What is there?"}
        )
        if ending == "client leaves":
            stream = create(server, EXACT, ending, messages=messages, stream=True, **{**options, "max_tokens": 200})
            next(iter(stream))
            stream.close()
        alone = create(server, OFF, f"{ending} alone", messages=messages, **options).choices
        answer = create(server, EXACT, ending, messages=messages, **options)
        assert [c.message.content for c in answer.choices] == [c.message.content for c in alone]
        computed.append(reported(answer)["lanes"]["computed"])
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or "-"})
    assert max(computed[2:]) < 80 < answer.usage.prompt_tokens - 80, computed
    assert server.metrics().get('ctxwin_fallbacks_total{tenant=""}') == fallbacks


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
    counted = server.metrics()
    assert counted['ctxwin_asks_total{tenant="acme"}'] >= 1
    assert counted['ctxwin_chats_total{behind="window",tenant="acme"}'] >= 1  # the chat that named a chunk
