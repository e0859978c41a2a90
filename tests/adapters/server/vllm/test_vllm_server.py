"""``ctxwin serve`` as a process on loopback, with vLLM and the bundled model, through the official client."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AuthenticationError, BadRequestError
from pydantic import ValidationError

from adapters.server.vllm.processes import Process
from adapters.server.vllm.program import CHUNKS, HEADER, cached, plain_messages, program, question
from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.audit import auditor_of
from ctxwin.errors import BudgetExceeded
from ctxwin_client import RemoteWindow, chunk_part, upload


def test_the_servers_own_endpoints_work_as_before(server: Process) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    whole = client.chat.completions.create(**asked, messages=plain_messages([0, 1], question(1)))
    stream = client.chat.completions.create(**asked, messages=plain_messages([0, 1], question(1)), stream=True)
    assert "".join(e.choices[0].delta.content or "" for e in stream) == whole.choices[0].message.content
    assert client.completions.create(**asked, prompt="color of").choices[0].text
    with pytest.raises(AuthenticationError):
        server.client("nobody").models.list()
    with pytest.raises(APIStatusError) as unknown:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.status_code == 404


@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_a_remote_window_answers_as_one_in_process(server: Process, mode: Any) -> None:
    fidelity = Fidelity(mode, rank=11)
    with open_engine("tiny:hf", dtype="float32") as engine, Window(engine, HEADER, 1500, fidelity) as local:
        expected = list(program(local))
    with RemoteWindow(server.client(), HEADER, 1500, fidelity) as remote:
        assert list(program(remote)) == expected
        answer = remote.ask(question(0), 4)
        assert answer.usage.engine == "vllm" and answer.usage.reused_tokens["resident"] > 0
        stream = remote.stream(question(0), 4)
        assert "".join(stream) == answer.text
        assert stream.answer is not None and stream.answer.token_ids == answer.token_ids
        with pytest.raises(BudgetExceeded):
            remote.ask(question(0), 4000)


def test_an_answer_of_an_attached_engine_is_audited(server: Process) -> None:
    """As the transformers engine says of the same window."""
    audits = []
    fidelity = Fidelity("blind", audit=1.0, advanced={"reference": "window"})
    with RemoteWindow(server.client(), HEADER, fidelity=fidelity) as remote:
        remote.extend(CHUNKS[:4])
        audits.append(remote.ask(question(3), 4, audit_within=30).audit)  # type: ignore[call-arg]
    with (
        open_engine("tiny", engine="hf", dtype="float32") as engine,
        Window(engine, HEADER, fidelity=fidelity) as local,
    ):
        local.extend(CHUNKS[:4])
        answer = local.ask(question(3), 4)
        assert auditor_of(engine).drain(60)
        audits.append(answer.audit)
    assert audits[0] == pytest.approx(audits[1], rel=1e-2, abs=1e-4)


def test_a_chat_that_names_chunks_is_the_same_prompt_and_reuses_their_kv(server: Process) -> None:
    client = server.client()
    for chunk in CHUNKS[:4]:
        upload(client, chunk)
    content: list[Any] = [*map(chunk_part, CHUNKS[:4]), {"type": "text", "text": question(2)}]
    messages: list[Any] = [{"role": "system", "content": HEADER}, {"role": "user", "content": content}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    named = client.chat.completions.create(**asked, messages=messages)
    plain = client.chat.completions.create(**asked, messages=plain_messages([0, 1, 2, 3], question(2)))
    assert named.choices[0].message.content == plain.choices[0].message.content
    assert named.usage is not None and plain.usage is not None
    assert named.usage.prompt_tokens == plain.usage.prompt_tokens
    encodes = server.metrics()['ctxwin_vision_encodes_total{tenant=""}']
    again = client.chat.completions.create(**asked, messages=messages)
    assert cached(again) > 0.9 * named.usage.prompt_tokens
    content[:4] = [content[3], content[0]]
    events = list(client.chat.completions.create(**asked, messages=messages, stream=True))
    assert "".join(e.choices[0].delta.content or "" for e in events)
    assert server.metrics()['ctxwin_vision_encodes_total{tenant=""}'] == encodes


# No object: the bundled model prefers a blank wherever JSON allows one, without end.
SCHEMA = {"enum": ["crimson", "navy blue"]}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "logprobs": True, "top_logprobs": 5},
        {"temperature": 1.5, "seed": 7, "n": 4, "logprobs": True, "top_p": 0.9},
        {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
)
def test_options_mean_what_they_mean_to_vllm(server: Process, options: dict[str, Any]) -> None:
    """The same request, once with chunks by name, which has a window behind it, and once with their pictures."""
    client = server.client()
    content: list[Any] = [*(chunk_part(upload(client, chunk)) for chunk in CHUNKS[:3])]
    content.append({"type": "text", "text": question(1)})
    messages: list[Any] = [{"role": "system", "content": HEADER}, {"role": "user", "content": content}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 64, **options}
    extra = {**options.get("extra_body", {}), "ctxwin": {"fidelity": {"mode": "exact"}}}
    named = client.chat.completions.create(**{**asked, "messages": messages, "extra_body": extra})
    plain = client.chat.completions.create(**asked, messages=plain_messages([0, 1, 2], question(1)))
    assert len(named.choices) == len(plain.choices) == options.get("n", 1)
    for ours, theirs in zip(named.choices, plain.choices, strict=True):
        assert ours.message.content == theirs.message.content and ours.message.content
        assert ours.finish_reason == theirs.finish_reason
        if "json_schema" in options.get("response_format", {}):
            assert json.loads(ours.message.content) in SCHEMA["enum"] and ours.finish_reason == "stop"
        if "logprobs" not in options:
            continue
        assert ours.logprobs is not None and theirs.logprobs is not None
        # vLLM counts the token that ends the answer, too.
        mine, others = ours.logprobs.content or [], theirs.logprobs.content or []
        assert 0 <= len(others) - len(mine) <= 1 and mine
        for one, other in zip(mine, others, strict=False):
            assert one.token == other.token and one.bytes == other.bytes
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [top.logprob for top in one.top_logprobs] == pytest.approx(
                [top.logprob for top in other.top_logprobs], abs=1e-4
            )


@pytest.mark.parametrize(
    "schema", [{"type": "no such type"}, {"type": "string", "pattern": "(?=x)("}, {"$ref": "#/nowhere"}]
)
def test_a_schema_that_cannot_be_held_to_is_refused(server: Process, schema: dict[str, Any]) -> None:
    client = server.client()
    messages: list[Any] = [{"role": "user", "content": [chunk_part(upload(client, Chunk.text("x")))]}]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(BadRequestError, match="schema"):
        client.chat.completions.create(model="tiny", messages=messages, response_format=wanted)


def test_what_vllm_would_refuse_is_the_clients_error(server: Process) -> None:
    with RemoteWindow(server.client(), HEADER, 500) as window:
        for wrong in ({"logprobs": 10**6}, {"stop": [10**6]}, {"seed": 2**63}):
            with pytest.raises(ValueError, match=r"must be|malformed"):
                window.ask(question(0), 2, **wrong)
        assert window.ask(question(0), 2, logprobs=3, stop=[5]).text is not None


@pytest.mark.parametrize("key", ["key-own", "key-acme"])
@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, 2**64, 10**30])
def test_a_seed_out_of_range_is_refused_in_vllms_words(server: Process, key: str, seed: int) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    turns = [{"role": "user", "content": "a"}]
    requests: list[tuple[str, Any, dict[str, Any]]] = [
        ("/chat/completions", ChatCompletionRequest, {"messages": turns}),
        ("/completions", CompletionRequest, {"prompt": "a"}),
        ("/responses", ResponsesRequest, {"input": "a"}),
    ]
    for path, schema, body in requests:
        body = {"model": "tiny", "seed": seed, **body}
        with pytest.raises(ValidationError) as own:
            schema.model_validate(body)
        [error] = own.value.errors()
        with pytest.raises(BadRequestError, match=f"{error['type']}.*seed.*{error['msg']}"):
            server.client(key).post(path, cast_to=object, body=body)
    body = {"model": "tiny", "max_tokens": 1, "seed": seed, "messages": turns}  # messages have no seed
    assert server.client().post("/messages", cast_to=object, body=body)


def test_windows_at_once_beside_plain_requests(server: Process) -> None:
    client = server.client()

    def windowed(i: int) -> tuple[str, str]:
        with RemoteWindow(client, HEADER, 1500) as window:
            ids = window.extend([CHUNKS[(i + k) % 6] for k in range(3)])
            first = window.ask(question(i % 6), 3).text
            window.slide(1)
            window.recall(ids[0])
            return first, window.ask(question(i % 6), 3).text

    def plain(i: int) -> str:
        made = client.chat.completions.create(
            model="tiny", max_tokens=3, temperature=0, messages=plain_messages([i % 6], question(i % 6))
        )
        return made.choices[0].message.content or ""

    alone = [windowed(i) for i in range(6)], [plain(i) for i in range(6)]
    with ThreadPoolExecutor(12) as pool:
        windows, plains = [pool.submit(windowed, i) for i in range(6)], [pool.submit(plain, i) for i in range(6)]
        assert ([w.result() for w in windows], [p.result() for p in plains]) == alone


def test_the_example_runs(server: Process) -> None:
    example = Path(__file__).parents[4] / "examples" / "remote_window.py"
    command = [sys.executable, str(example), "--base-url", f"{server.url}/v1", "--api-key", "key-own"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    names = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert names == [*(f"t={i}" for i in range(8)), "first frame again", "chat"]


def test_metrics_stand_beside_vllms(server: Process) -> None:
    before = server.metrics().get('ctxwin_asks_total{tenant=""}', 0)
    with RemoteWindow(server.client(), HEADER, 1500, Fidelity("patched", rank=11)) as window:
        answers = list(program(window))
        assert window.maintenance.compress(if_short=True) == 0  # the store has bytes enough
        assert window.maintenance.compress() > 0
        answers.append(window.ask(question(0), 4).text)
    found = server.metrics()
    shown = "".join(found)
    assert not [secret for secret in ("key-", HEADER, "color of", window.id, CHUNKS[0].id) if secret in shown]
    assert any(name.startswith("vllm:prompt_tokens_total") for name in found)
    assert found['ctxwin_asks_total{tenant=""}'] == before + len(answers)
    assert found['ctxwin_loaded_bytes_total{tenant=""}'] > 0 and found['ctxwin_loads_total{tenant=""}'] > 0
    assert found['ctxwin_patches_formed_total{tenant=""}'] >= found['ctxwin_patches_served_total{tenant=""}'] > 0
    assert found['ctxwin_prompt_tokens_total{lane="survivor",tenant=""}'] > 0
    assert found['ctxwin_vision_encodes_saved_total{tenant=""}'] >= 4 * len(answers) - 6
    assert found['ctxwin_store_reads_total{result="hit",tenant="",tier="0-memory"}'] > 0
    assert found['ctxwin_fallbacks_total{tenant=""}'] == 0
    assert found['ctxwin_windows_open{tenant=""}'] == 0
