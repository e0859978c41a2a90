"""Lazy drops and late system prompts on a running server: answers are vLLM's to the prompt as served, and fewer tokens are
computed."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from adapters.server.chat.test_edited_chats import (
    _PROMPT,
    CHAT,
    MESSAGES,
    RESPONSES,
    Process,
    assistant,
    chat,
    logprobs,
    picture,
    png,
    question,
    system,
    user,
    words,
)  # fmt: skip

pytestmark = pytest.mark.vllm

LAZY, OFF = {"lazy_drops": "on"}, {"lazy_drops": "off"}


@pytest.fixture
def server(vllm_server: Process) -> Process:
    return vllm_server


def ask(
    server: Process, path: str, body: dict[str, Any], name: str, key: str = "key-own", head: Any = None, **fields: Any
) -> httpx.Response:
    headers = {"x-session-id": name, "authorization": f"Bearer {key}", **(head or {})}
    return httpx.post(
        server.url + path, json={"model": "tiny", "temperature": 0, **body, **fields}, headers=headers, timeout=60
    )


def turns_of(path: str, first: int, last: int, seed: int = 0) -> dict[str, Any]:
    """A request of a route that shows the frames from ``first`` to ``last``, each with its answer but the newest."""
    turns: list[dict[str, Any]] = []
    for i in range(first, last):
        data = png(i % 8, seed)
        if path == CHAT:
            turns.append(user(f"step {i}", picture(i % 8, seed), question(i % 8)))
        elif path == MESSAGES:
            source = {"type": "base64", "media_type": "image/png", "data": data}
            turns.append(user(f"step {i}", {"type": "image", "source": source}, question(i % 8)))
        else:
            shown = {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}
            parts = [f"step {i}", shown, question(i % 8)]
            parts = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]
            turns.append({"role": "user", "content": parts})
        if i < last - 1:
            turns.append(assistant(f"crimson {i}"))
    if path == CHAT:
        return chat(system(), *turns)[1]
    if path == MESSAGES:
        return {"system": "You watch.", "messages": turns, "max_tokens": 6}
    return {"instructions": "You watch.", "input": turns, "max_output_tokens": 6}


def kept(answer: httpx.Response) -> dict[str, int]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"]["ctxwin"]["kept"])


def prompt_and_cached(answer: httpx.Response) -> tuple[int, int]:
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0
    return sum(usage.get(name) or 0 for name in _PROMPT), cached


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_loop_is_answered_as_the_longer_prompt_and_computes_less(server: Process, path: str) -> None:
    """Twelve turns of an agent that keeps its newest three screenshots."""
    computed, seen, name = {"lazy": 0, "sent": 0}, [], path.rpartition("/")[2]
    for turn in range(12):
        first = max(0, turn - 2)
        sent = turns_of(path, first, turn + 1)
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 4} if path == CHAT else {}
        lazy = ask(server, path, sent, "loop", cache_salt=f"lazy {name}", **fields)
        seen.append(kept(lazy)["pictures"])
        longer = turns_of(path, first - seen[-1], turn + 1)
        alone = ask(server, path, longer, "alone", cache_salt=f"alone {name}", ctxwin=OFF, **fields)
        assert words(lazy) == words(alone) and prompt_and_cached(lazy)[0] == prompt_and_cached(alone)[0]
        if path == CHAT:
            for (token, value), (expected, want) in zip(logprobs(lazy), logprobs(alone), strict=True):
                assert token == expected and value == pytest.approx(want, abs=1e-3)
        as_sent = ask(server, path, sent, "sent", cache_salt=f"sent {name}", ctxwin=OFF)
        for way, answer in (("lazy", lazy), ("sent", as_sent)):
            prompt, cached = prompt_and_cached(answer)
            computed[way] += prompt - cached
    assert seen == [0, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert computed["lazy"] < 0.6 * computed["sent"]


def test_a_stream_says_what_was_kept_and_the_metrics_count_it(server: Process) -> None:
    before = server.metrics()
    for first, last in ((0, 3), (1, 4)):
        body = turns_of(CHAT, first, last, 5000)
        streamed = ask(server, CHAT, body, "stream", stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    [usage] = [event["usage"]["ctxwin"] for event in events if event.get("usage")]
    said = usage["kept"]
    assert said["parts"] == 4 and said["pictures"] == 1 and said["turns"] == 1 and said["tokens"] > 0
    now = server.metrics()
    counted = {
        'rewrites_total{result="kept",tenant=""}': 1,
        'kept_pictures_total{tenant=""}': 1,
        'rewrite_tokens_total{result="kept",tenant=""}': said["tokens"],
    }
    for name, value in counted.items():
        assert now[f"ctxwin_{name}"] - before.get(f"ctxwin_{name}", 0.0) == value


def test_two_conversations_of_one_name_keep_what_is_theirs(server: Process) -> None:
    for first, last in ((0, 3), (1, 4), (2, 5)):
        for seed in (6000, 6001):
            lazy = ask(server, CHAT, turns_of(CHAT, first, last, seed), "both", cache_salt="both")
            assert kept(lazy)["pictures"] == first
            longer = turns_of(CHAT, 0, last, seed)
            alone = ask(server, CHAT, longer, "", cache_salt="both alone")
            assert words(lazy) == words(alone) and kept(alone)["parts"] == 0  # it names no conversation


def test_a_client_that_leaves_leaves_a_memory_that_serves(server: Process) -> None:
    assert kept(ask(server, CHAT, turns_of(CHAT, 0, 3, 7000), "left"))["parts"] == 0
    host, port = server.url.removeprefix("http://").split(":")
    left = http.client.HTTPConnection(host, int(port))
    sent = {"model": "tiny", "temperature": 0, "stream": True, **turns_of(CHAT, 1, 4, 7000)}
    head = {"Content-Type": "application/json", "x-session-id": "left", "Authorization": "Bearer key-own"}
    left.request("POST", CHAT, json.dumps(sent), head)
    left.close()
    lazy = ask(server, CHAT, turns_of(CHAT, 2, 5, 7000), "left")
    longer = turns_of(CHAT, 2 - kept(lazy)["pictures"], 5, 7000)
    assert words(lazy) == words(ask(server, CHAT, longer, "", ctxwin=OFF))


@pytest.mark.parametrize(("key", "most"), [("key-own", 8), ("key-acme", 7)])
def test_what_is_refused_for_what_was_kept_is_served_as_sent(server: Process, key: str, most: int) -> None:
    """By vLLM beyond ``--limit-mm-per-prompt``, which lazy drops do not know, and by the gateway beyond a tenant's frames."""
    ask(server, CHAT, turns_of(CHAT, 0, most, 8000), "refused", key)
    sent = turns_of(CHAT, 3, most + 1, 8000)
    answer = ask(server, CHAT, sent, "refused", key)
    assert kept(answer) == {"parts": 0, "pictures": 0, "tokens": 0, "turns": 0}
    assert words(answer) == words(ask(server, CHAT, sent, "", key, ctxwin=OFF))
    assert kept(ask(server, CHAT, turns_of(CHAT, 4, most + 2, 8000), "refused", key))["pictures"] == 1
    wrong = ask(server, CHAT, turns_of(CHAT, 5, most + 3, 8000), "refused", key, temperature=-3)
    assert wrong.status_code == 400 and "temperature" in wrong.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_tenants_drops_are_kept_for_that_tenant_alone(server: Process, path: str) -> None:
    for first, last in ((0, 3), (1, 4), (2, 5)):
        lazy = ask(server, path, turns_of(path, first, last, 8500), "tenant", "key-acme")
        other = ask(
            server, path, turns_of(path, first, last, 8500), "tenant", "key-bolt", ctxwin=LAZY if first > 1 else OFF
        )
        assert kept(lazy)["pictures"] == first and (first < 2 or kept(other)["pictures"] == 0)
    alone = ask(server, path, turns_of(path, 0, 5, 8500), "", "key-acme", ctxwin=OFF)
    assert words(lazy) == words(alone) and prompt_and_cached(lazy)[0] == prompt_and_cached(alone)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"ctxwin": OFF},
        {"max_tokens": 10**6},
        {"context_management": {"edits": [{"type": "clear_images", "keep": {"type": "images", "value": 9}}]}},
    ],
    ids=["off", "too long", "context_management"],
)
def test_what_the_client_wants_forgotten_is_not_kept(server: Process, fields: dict[str, Any]) -> None:
    name = str(sorted(fields))
    ask(server, CHAT, turns_of(CHAT, 0, 3, 9000), name)
    before = ask(server, CHAT, turns_of(CHAT, 1, 4, 9000), name)
    assert kept(before)["pictures"] == 1
    answer = ask(server, CHAT, turns_of(CHAT, 2, 5, 9000), name, **fields)
    if "max_tokens" in fields:
        assert answer.status_code == 400  # as sent, too
    else:
        sent = ask(server, CHAT, turns_of(CHAT, 2, 5, 9000), "", ctxwin=OFF)
        assert prompt_and_cached(answer)[0] == prompt_and_cached(sent)[0] and words(answer) == words(sent)
        assert "ctxwin" in fields or not any(kept(answer).values()), "lazy drops are on, and keep nothing"
    later = kept(ask(server, CHAT, turns_of(CHAT, 3, 6, 9000), name, ctxwin=LAZY))
    assert later["pictures"] == (1 if "max_tokens" in fields else 0)


def test_a_window_behind_lazy_drops_is_that_of_the_longer_prompt(server: Process) -> None:
    exact = {"windows": "auto", "fidelity": {"mode": "exact"}}
    for first, last in ((0, 3), (1, 4), (2, 5)):
        lazy = ask(server, CHAT, turns_of(CHAT, first, last, 9500), "window", cache_salt="window", ctxwin=exact)
        used = lazy.json()["usage"]
        assert used["ctxwin"]["kept"]["pictures"] == first and lazy.headers["x-ctxwin-windows"] == "auto"
        assert sum(used["ctxwin"]["lanes"].values()) == used["prompt_tokens"]
        alone = ask(server, CHAT, turns_of(CHAT, 0, last, 9500), "", cache_salt="window alone", ctxwin=OFF)
        assert words(lazy) == words(alone) and used["prompt_tokens"] == alone.json()["usage"]["prompt_tokens"]


def test_a_request_chooses_by_field_or_header(server: Process) -> None:
    for name, head in (("header", {"x-ctxwin-lazy-drops": "pictures=0"}), ("nothing", {})):
        for first, last in ((0, 3), (1, 4)):
            answer = ask(server, CHAT, turns_of(CHAT, first, last, 9700), name, head=head)
        assert kept(answer)["pictures"] == (not head)
    wrong = ask(server, CHAT, turns_of(CHAT, 0, 1), "wrong", ctxwin={"lazy_drops": {"pictures": 3}})
    assert wrong.status_code == 400 and "lazy drops must be on, off, or like pictures=8" in wrong.text


def clocked(path: str, steps: int, rules: str, late: Mapping[int, str] | None = None, seed: int = 0) -> dict[str, Any]:
    """A request of a route with a picture in each turn; ``late``: system messages in front of the questions of some."""
    body = turns_of(path, 0, steps, seed)
    turns = body["input" if path == RESPONSES else "messages"]
    if path == CHAT:
        turns[0] = system(rules)
    else:
        body["instructions" if path == RESPONSES else "system"] = rules
    for step in sorted(late or (), reverse=True):
        at = 2 * step + (path == CHAT)
        *shown, asked = turns[at]["content"]
        divided = [{"role": "user", "content": content} for content in (shown, [asked])]
        turns[at : at + 1] = [divided[0], system(late[step]), divided[1]]
    return body


@pytest.mark.parametrize("way", ["late", "append"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_clock_in_the_system_prompt_is_answered_as_if_it_stood_in_front_of_the_question(
    server: Process, path: str, way: str
) -> None:
    """The first request is served as sent, the others as with a system message late in it, or one a turn; a tenant's, too."""
    before, name = server.metrics(), f"{way} {path.rpartition('/')[2]}"
    volatile = {"volatile": way, "lazy_drops": "off"}
    for key, turns in (("key-acme", 2), ("key-own", 5)):
        computed, tokens = [0, 0], 0
        for steps in range(1, turns + 1):
            clock = f"It is 12:0{steps}."
            sent = clocked(path, steps, f"You watch. {clock}\nBe brief.")
            fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 4} if path == CHAT else {}
            late = ask(server, path, sent, "clock", key, cache_salt=f"late {name}", ctxwin=volatile, **fields)
            assert late.status_code == 200, late.text
            said = late.json()["usage"]["ctxwin"]["late"]
            parts = 0 if steps == 1 else 1 if way == "late" else steps
            said["earlier"] = said.get("earlier", 0)
            assert said == {"parts": parts, "tokens": said["tokens"], "form": "system", "earlier": said["earlier"]}
            assert (said["tokens"] > said["earlier"]) == (steps > 1) and (said["earlier"] > 0) == (parts > 1)
            tokens += said["tokens"]
            rules, first = (
                ("You watch. Be brief.", steps - 1) if way == "late" else ("You watch. It is 12:01.\nBe brief.", 1)
            )
            clocks = {step: f"It is 12:0{step + 1}." for step in range(first, steps)}
            placed = clocked(path, steps, rules, clocks) if steps > 1 else sent
            alone = ask(server, path, placed, "", key, cache_salt=f"placed {name}", ctxwin=OFF, **fields)
            assert words(late) == words(alone) and prompt_and_cached(late)[0] == prompt_and_cached(alone)[0]
            if path == CHAT:
                for (token, value), (expected, want) in zip(logprobs(late), logprobs(alone), strict=True):
                    assert token == expected and value == pytest.approx(want, abs=1e-3)
            as_sent = ask(server, path, sent, "", key, cache_salt=f"sent {name}", ctxwin=OFF)
            for i, answer in enumerate((late, as_sent)):
                prompt, cached = prompt_and_cached(answer)
                computed[i] += prompt - cached
    assert computed[0] < 0.8 * computed[1]
    counted = server.metrics()['ctxwin_rewrite_tokens_total{result="late",tenant=""}']
    assert counted - before.get('ctxwin_rewrite_tokens_total{result="late",tenant=""}', 0.0) == tokens


EXACTLY = {"windows": "auto", "fidelity": {"mode": "exact"}}


@pytest.mark.parametrize(
    ("path", "mode", "key"),
    [(CHAT, OFF, "key-own"), (CHAT, EXACTLY, "key-own"), (RESPONSES, OFF, "key-acme"), (MESSAGES, OFF, "key-own")],
    ids=["chat", "exact", "tenant's responses", "messages"],
)
def test_what_an_agent_drops_next_is_computed_ahead(server: Process, path: str, mode: dict[str, Any], key: str) -> None:
    """An agent that keeps its newest three screenshots, and thinks until its next prompt has been computed."""
    tenant = "acme" if key == "key-acme" else ""
    complete, used = (
        f'ctxwin_{name}_total{{result="{result}",tenant="{tenant}"}}'
        for name, result in (("prefills", "complete"), ("prefilled_tokens", "used"))
    )
    before, name, computed, said = server.metrics(), f"{path} {mode}", [0, 0], []
    for turn in range(8):
        sent = turns_of(path, max(0, turn - 2), turn + 1, 10000)
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 4} if path == CHAT else {}
        ways = {"ahead": mode | {"prefill": "idle", "lazy_drops": "off"}, "alone": OFF | {"lazy_drops": "off"}}
        ahead, alone = (
            ask(server, path, sent, way, key, cache_salt=f"{way} {name}", ctxwin=ctxwin, **fields)
            for way, ctxwin in ways.items()
        )
        assert words(ahead) == words(alone) and prompt_and_cached(ahead)[0] == prompt_and_cached(alone)[0]
        if path == CHAT:
            for (token, value), (expected, want) in zip(logprobs(ahead), logprobs(alone), strict=True):
                assert token == expected and value == pytest.approx(want, abs=1e-3)
        for i, answer in enumerate((ahead, alone)):
            prompt, cached = prompt_and_cached(answer)
            computed[i] += (prompt - cached) * (turn > 3)
        said.append(ahead.json()["usage"].get("ctxwin", {}).get("prefilled_tokens", 0))
        until(lambda: server.metrics().get(complete, 0) - before.get(complete, 0) == max(0, turn - 2))  # noqa: B023
    assert [tokens > 0 for tokens in said] == [False] * 4 + [True] * 4
    assert server.metrics()[used] - before.get(used, 0) == sum(said)
    assert computed[0] < 0.6 * computed[1], computed


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_windows_that_reuse_kv_need_no_prefill(server: Process) -> None:
    before = server.metrics()
    for turn in range(4):
        sent = turns_of(CHAT, turn, turn + 3, 11000)
        answer = ask(server, CHAT, sent, "reuse", ctxwin={"windows": "auto", "prefill": "idle", "lazy_drops": "off"})
        assert answer.headers["x-ctxwin-windows"] == "auto"
    key = 'ctxwin_prefills_total{result="complete",tenant=""}'
    assert server.metrics().get(key, 0) == before.get(key, 0)


def test_what_an_agent_drops_stays_behind_a_clock(server: Process) -> None:
    for first, last in ((0, 2), (0, 3), (1, 4), (2, 5)):
        lazy = turns_of(CHAT, first, last, 9900)
        lazy["messages"][0] = system(f"You watch.\nIt is {last}.")
        answer = ask(server, CHAT, lazy, "both", cache_salt="both", ctxwin={"volatile": "late"})
        assert kept(answer)["pictures"] == first
    longer = clocked(CHAT, 5, "You watch.\n", {4: "It is 5."}, 9900)
    assert words(answer) == words(ask(server, CHAT, longer, "", cache_salt="both alone", ctxwin=OFF))
