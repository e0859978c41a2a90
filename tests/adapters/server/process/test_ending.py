"""How ``ctxwin serve`` ends: as asked for, at any time, with nothing left, and with its windows kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import OpenAI

import system
from adapters.server.vllm.processes import descendants, free_port
from ctxwin import Chunk
from ctxwin_client import RemoteWindow
from ctxwin_server.process import supervisor

PARENT, IMPORTS, LOADS, SERVES = "starting vLLM", "APIServer pid", "EngineCore pid", "Application startup complete.$"
"""What a server has written when its parent has started it, it has imported vLLM, its engine opens, it serves."""
NOISE = re.compile("Traceback|leaked|resource_tracker|KeyboardInterrupt")
LIMIT_S = 400.0
CHUNKS = [Chunk.text(f"The door of room {i} is open. ") for i in range(4)]


@dataclass
class Server:
    """A supervised ``ctxwin serve tiny``."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    def wait_for(self, shape: str, times: int = 1) -> None:
        """Returns once it has written ``times`` lines of a shape."""
        until = time.monotonic() + LIMIT_S
        while sum(bool(re.search(shape, line.rstrip())) for line in list(self.lines)) < times:
            assert time.monotonic() < until and self.process.poll() is None, "".join(self.lines)[-4000:]
            time.sleep(0.05)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)

    def end(self, number: signal.Signals) -> None:
        """Sends a signal and holds the end against what it shall be."""
        self.process.send_signal(number)
        status = self.process.wait(LIMIT_S)
        text = "".join(self.lines)
        assert status == (0 if number == signal.SIGTERM else 130), text[-4000:]
        left = system.running(self.process.pid, os.getsid).values()
        assert not [line for line in left if "resource_tracker" not in line], "a process of the server is left"
        assert not [line for line in text.splitlines() if NOISE.search(line)]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [
        sys.executable, "-m", "ctxwin", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--store", f"disk:{folder / 'kv'}", "--max-model-len", "4096",
    ]  # fmt: skip
    # Other tests of this process have vLLM say less; what is waited for here is in its log.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    server = Server(process, port)
    assert process.stdout is not None
    reader = threading.Thread(target=server.lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    groups = set()
    try:
        yield server
    finally:
        groups = {process.pid, *descendants(process.pid)}
        for pid in groups:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait(LIMIT_S)


GUARD = [pytest.mark.slow, pytest.mark.guard]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("written", "number"),
    [
        (PARENT, "SIGINT"),
        pytest.param(IMPORTS, "SIGTERM", marks=GUARD),
        pytest.param(PARENT, "SIGTERM", marks=GUARD),
        pytest.param(IMPORTS, "SIGINT", marks=GUARD),
        pytest.param(LOADS, "SIGTERM", marks=GUARD),
        pytest.param(LOADS, "SIGINT", marks=GUARD),
    ],
)
def test_it_ends_while_it_opens(tmp_path: Path, written: str, number: str) -> None:
    with serving(tmp_path) as server:
        server.wait_for(written)
        server.end(signal.Signals[number])


def streaming(port: int) -> socket.socket:
    """A chat whose answer has begun and would take minutes; nobody reads on."""
    asked = {"model": "tiny", "stream": True, "max_tokens": 3900, "ignore_eos": True}
    body = json.dumps({**asked, "messages": [{"role": "user", "content": "?"}]}).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    while b"data:" not in connection.recv(1 << 16):
        pass
    return connection


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.timeout(1800)
def test_a_killed_server_is_started_again_and_its_windows_are_back(tmp_path: Path) -> None:
    """Killed as a machine without memory does, ended during a stream, and started anew."""
    with serving(tmp_path) as server:
        server.wait_for(SERVES)
        window = RemoteWindow(server.client(), "A corridor.", 900)
        ids = window.extend(CHUNKS)
        window.evict(ids[1])
        expected = window.ask("Which door is open?", 4).text
        (child,) = [pid for pid in descendants(server.process.pid) if os.getpgid(pid) == pid]
        os.kill(child, signal.SIGKILL)
        server.wait_for(SERVES, times=2)
        back = RemoteWindow.attach(server.client(), window.id)
        assert back.ids == window.ids and back.evicted == (ids[1],) and back.version == window.version
        assert back.ask("Which door is open?", 4).text == expected
        back.append(CHUNKS[1])
        kept = back.ids
        with contextlib.closing(streaming(server.port)):
            server.end(signal.SIGINT)
    with serving(tmp_path) as server:
        server.wait_for(SERVES)
        assert RemoteWindow.attach(server.client(), window.id).ids == kept
        with streaming(server.port) as connection:
            told: list[bytes] = []
            reader = threading.Thread(target=lambda: told.extend(iter(lambda: connection.recv(1 << 16), b"")))
            reader.start()
            server.end(signal.SIGTERM)
            reader.join(LIMIT_S)
        assert b"[DONE]" in b"".join(told)[-200:], "its client was left without an end of its stream"


@pytest.mark.vllm
def test_what_is_waited_for_at_the_end_is_less_than_5_seconds() -> None:
    from ctxwin_server.vllm import arguments, server

    steps = 2 * server._ABORT_S + server._ENGINE_S + 0.1 + server._CONNECTIONS_S + server._WINDOWS_S
    assert steps <= supervisor._CLOSING_S + 1e-9
    assert arguments._SHUTDOWN_S + supervisor._CLOSING_S + 2 * supervisor._LEFT_S <= 5
    assert supervisor._OPENING_S + 2 * supervisor._LEFT_S <= 5
