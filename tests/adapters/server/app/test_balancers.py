"""Servers on one store behind vLLM's own router: windows and named conversations stay on one of them, and outlive it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from openai import OpenAI

from adapters.server.serving import Server, serving
from ctxwin import Chunk
from ctxwin_client import RemoteWindow
from store.redis_server import Server as Redis

QUESTION = "Which door is open?"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def routed(stack: ExitStack, servers: list[Server]) -> str:
    """The address of vLLM's router in front of the servers."""
    program = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("vllm-router is not installed; run pip install vllm-router")
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(str(free.getsockname()[1]))
    command = [program, "--policy", "consistent_hash", "--port", ports[0], "--prometheus-port", ports[1]]
    command += ["--health-check-interval-secs", "1", "--worker-urls", *(server.url for server in servers)]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    stack.callback(process.kill)
    url = f"http://127.0.0.1:{ports[0]}"
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"{url}/health") as answer:
                if answer.status == 200:
                    return url
        except OSError:
            assert process.poll() is None, "vllm-router ended at once"
        time.sleep(0.1)
    raise AssertionError("vllm-router does not answer")


def test_windows_and_conversations_behind_vllm_router(stack: ExitStack, tmp_path: Path) -> None:
    redis = stack.enter_context(Redis(tmp_path))
    store = f"tiered:memory:,{redis.url}"
    first, leaving = stack.enter_context(serving(store=store)), ExitStack()
    stack.push(leaving)
    second = leaving.enter_context(serving(store=store))
    url = routed(stack, [first, second])
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8)

    windows = [RemoteWindow(client, f"You watch house {i}.", 900) for i in range(8)]
    for i, window in enumerate(windows):
        window.extend([Chunk.text(f"The door of room {i}{j} is open. ") for j in range(4)])
    taken = [server.service.tenant_state("").windows.taken_over for server in (first, second)]
    answers = []
    for window in windows:
        window.evict(window.ids[0])
        window.append(Chunk.text("The door of the hall is open. "))
        answers.append(window.ask(QUESTION, 4).text)
    assert all(len(server.service.tenant_state("").windows) for server in (first, second)), "the router spreads them"
    assert taken == [server.service.tenant_state("").windows.taken_over for server in (first, second)], (
        "behind its first request a window stays where it is"
    )

    for name in [f"chat-{i}" for i in range(8)] * 3:
        body = {"model": "tiny", "messages": [{"role": "user", "content": name}], "max_tokens": 1}
        client.post("/chat/completions", cast_to=object, body=body, options={"headers": {"x-session-id": name}})
    chats = [{body["messages"][0]["content"] for body in server.passed} for server in (first, second)]
    assert not chats[0] & chats[1] and len(chats[0] | chats[1]) == 8

    leaving.close()
    assert [window.ask(QUESTION, 4).text for window in windows] == answers, "whoever is left takes them over"
    for window in windows:
        window.check()
