"""A server as a process, and its users over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from system import stop_session

REFUSED = (400, 401, 403, 404, 413, 415, 422, 429)


TENANTS = """
[[tenant]]
name = "mallory"
keys = ["key-mallory"]

[[tenant]]
name = "laboratory"
keys = ["key-laboratory"]

[[tenant]]
name = "bystander"
keys = ["key-bystander"]
"""


@dataclass
class Victim:
    """A server as a process; ``log`` is what it has written and ``store`` its folder of KV."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    store: Path

    def members(self) -> list[int]:
        """The server's process and all below it that still run, whatever group they are in."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(stat.parent.name)] = int(parent)
        found = [self.process.pid] if self.process.pid in parents else []
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def resident(self) -> int:
        """Resident bytes of all processes together; what they share counts for each."""
        total = 0
        for pid in self.members():
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return total * os.sysconf("SC_PAGE_SIZE")

    def user(self, name: str) -> Client:
        return Client(self.port, f"Bearer key-{name}" if name else None)


class Client:
    """One user of the server, by API key. Thread-safe: each call has a connection of its own, unless it is `kept`."""

    def __init__(self, port: int, authorization: str | None) -> None:
        self._port = port
        self._headers = {"authorization": authorization} if authorization else {}
        self._kept: http.client.HTTPConnection | None = None
        self.prompt = "system_prompt"
        """What the server calls a window's system prompt; earlier ones called it header."""

    def call(
        self, path: str, body: Any = None, method: str | None = None, timeout: float = 60.0, **headers: str
    ) -> tuple[int, Any]:
        """Status and parsed body; status 0 where the server gave no answer in ``timeout`` seconds."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data, {**self._headers, **named})
            answer = connection.getresponse()
            raw = answer.read()
            return answer.status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def window(self, system_prompt: str = "You watch a camera.", chunks: list[Any] | None = None, **body: Any) -> str:
        """The id of a new window."""
        status, made = self.call("/v1/windows", {self.prompt: system_prompt, **body})
        if status == 400 and "system_prompt" in str(made):
            self.prompt = "header"
            status, made = self.call("/v1/windows", {"header": system_prompt, **body})
        assert status == 200, (status, made)
        if chunks:
            assert self.call(f"/v1/windows/{made['id']}/extend", {"chunks": chunks})[0] == 200
        return str(made["id"])

    def ask(self, window: str, query: str, max_tokens: int = 3, **body: Any) -> tuple[int, Any]:
        return self.call(f"/v1/windows/{window}/ask", {"query": query, "max_tokens": max_tokens, **body})

    def close(self, window: str) -> None:
        self.call(f"/v1/windows/{window}", method="DELETE")

    def chat(self, content: Any, timeout: float = 60.0, headers: dict[str, str] | None = None, **body: Any) -> Any:
        asked = {"model": "tiny", "max_tokens": 2, "temperature": 0, **body}
        asked["messages"] = [{"role": "user", "content": content}]
        return self.call("/v1/chat/completions", asked, timeout=timeout, **(headers or {}))


@contextlib.contextmanager
def besieged(folder: Path, *arguments: str, tree: str = "", tenants: bool = True) -> Iterator[Victim]:
    """``ctxwin serve tiny`` on vLLM, with three tenants or with one key, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "tenants.toml").write_text(TENANTS)
    command = [sys.executable, "-m", "ctxwin", "serve", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--store", f"disk:{folder / 'kv'}", *arguments]
    command += ["--tenants", str(folder / "tenants.toml")] if tenants else ["--api-key", "key-owner"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if tree:
        environment["PYTHONPATH"] = tree
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=folder
        )
    victim = Victim(port, process, log, folder / "kv")
    try:
        until = time.monotonic() + 450
        while victim.user("").call("/health", timeout=5)[0] != 200:
            assert process.poll() is None and time.monotonic() < until, f"no server: {log.read_text()[-4000:]}"
            time.sleep(0.5)
        yield victim
    finally:
        stop_session(process)


def refused(status: int, answer: Any) -> None:
    assert status in REFUSED, (status, str(answer)[:300])


def together(work: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
