"""A server that is near the end of its memory takes no new work, says so, and takes it again when there is room."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from adapters.server.calls import call, read_metrics
from adapters.server.serving import Server, serving
from ctxwin_client.errors import MemoryShort
from ctxwin_server.app.memory import Memory, machine_bytes, memory_of, process_tree
from ctxwin_server.app.settings import Settings
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.protocol.limits import Limits

GIB = 1 << 30


@pytest.mark.parametrize("tenants", [(), (Tenant(name="acme", keys=["a"]),)], ids=["alone", "tenants"])
def test_new_work_is_refused_while_memory_is_short(tenants: Any) -> None:
    with serving(Limits(max_memory=GIB), tenants) as server:
        as_acme: dict[str, Any] = {"authorization": "Bearer a"} if tenants else {}
        memory = server.service.memory
        memory.close()  # its own looks
        memory.used = 0
        window = call(server, "/v1/windows", {"system_prompt": "h"}, **as_acme)[1]["id"]
        memory.used = GIB
        for path, body in (
            ("/v1/windows", {}), (f"/v1/windows/{window}/append", {"chunk": {"type": "text", "text": "x"}}),
            (f"/v1/windows/{window}/ask", {"query": "?"}), ("/v1/chunks", {"type": "text", "text": "x"}),
            ("/v1/chat/completions", {"messages": []}), ("/v1/messages", {}), ("/tokenize", {"prompt": "x"}),
            ("/v1/libraries", {"name": "x"}), (f"/v1/windows/{window}/fork", {}),
        ):  # fmt: skip
            code, answer = call(server, path, body, **as_acme)
            assert (code, answer["error"]["code"]) == (503, "memory_short"), path
            assert "--max-memory" in answer["error"]["message"]
        assert not server.passed
        assert retry_after(server, as_acme) == "5"
        assert call(server, "/ready") == (503, {"status": "memory is short"})
        assert call(server, f"/v1/windows/{window}", **as_acme)[0] == 200
        assert call(server, f"/v1/windows/{window}", method="DELETE", **as_acme)[0] == 200
        shown = read_metrics(server)
        label = '{tenant=""}' if tenants else ""
        assert shown[f"ctxwin_memory_refused_total{label}"] == 10
        assert shown[f"ctxwin_memory_bytes{label}"] == shown[f"ctxwin_memory_limit_bytes{label}"] == GIB
        memory.used = GIB - 1
        assert call(server, "/ready")[0] == 200
        assert call(server, "/v1/windows", {}, **as_acme)[0] == 200


def retry_after(server: Server, headers: dict[str, str]) -> str | None:
    asked = urllib.request.Request(f"{server.url}/v1/windows", b"{}", {"content-type": "application/json", **headers})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked)
    return refused.value.headers["retry-after"]


def test_frames_are_refused_too_and_their_socket_stays_open() -> None:
    websockets = pytest.importorskip("websockets.sync.client")
    with serving() as server:
        window = call(server, "/v1/windows", {"system_prompt": "h"})[1]["id"]
        memory = server.service.memory
        memory.close()
        with websockets.connect(f"{server.url.replace('http', 'ws')}/v1/windows/{window}/live") as socket:
            assert '"open"' in socket.recv()
            memory.used = memory.limit
            socket.send('{"type": "push", "chunk": {"type": "text", "text": "a frame"}}')
            assert "memory_short" in socket.recv()
            memory.used = 0
            socket.send('{"type": "push", "chunk": {"type": "text", "text": "a frame"}}')
            assert '"placed"' in socket.recv()


def test_what_a_child_takes_counts_and_is_given_back() -> None:
    program = "import sys; x = bytearray(200 << 20); print(); sys.stdin.read()"
    memory = Memory(GIB)
    memory.look()
    before = memory.used
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert child.pid in process_tree(os.getpid())
        assert 200 << 20 <= memory_of([child.pid]) < 260 << 20
        memory._looked = float("-inf")
        memory.look()
        assert memory.used - before > 150 << 20
        memory.limit = memory.used
        with pytest.raises(MemoryShort, match="of memory"):
            memory.check()
        child.stdin.close()
        child.wait()
    memory.look()
    memory.check()
    assert memory.refused == 1


def test_memory_that_nothing_uses_is_given_back_before_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [200, 90, 150, 150]
    memory = Memory(100, lambda _: sizes.pop(0))
    memory.look()
    assert not memory.short, "what the allocator kept was enough"
    memory.look()
    assert memory.short and sizes == [150], "it is not tried at every look"


def test_a_heap_is_trimmed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[float] = []
    now = 0.0
    monkeypatch.setattr("ctxwin_server.app.memory.time.monotonic", lambda: now)
    monkeypatch.setattr("ctxwin_server.app.memory.give_back", lambda: trims.append(now))
    memory = Memory(100, lambda _: 1)
    for second in range(1000):
        now = float(second)
        memory.look()
    assert len(trims) == 17 and all(b - a > 60 for a, b in itertools.pairwise(trims))


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, 8 * GIB),
        ("0::/\n", {"memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ("0::/a/b\n", {"a/memory.max": f"{3 * GIB}\n", "a/b/memory.max": "max\n"}, 3 * GIB),
        ("0::/a/b\n", {"a/memory.max": f"{3 * GIB}\n", "a/b/memory.max": f"{GIB}\n"}, GIB),
        ("0::/not/here\n", {"memory.max": f"{GIB}\n"}, GIB),
        ("5:cpu,memory:/x\n1:name=systemd:/\n", {"memory/x/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("5:memory:/x\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8 * GIB),
        ("", {}, 8 * GIB),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, group: str, files: dict[str, str], expected: int) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       {8 << 20} kB\nMemFree:        1 kB\n")
    (proc / "self" / "cgroup").write_text(group)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    assert machine_bytes(proc, cgroups) == expected


def test_the_bound_is_a_setting() -> None:
    assert Settings(max_memory="3GiB").service()["limits"].max_memory == 3 * GIB
    assert Settings().service()["limits"].max_memory is None
    assert Memory().limit == int(0.8 * machine_bytes()) > 0
    with pytest.raises(ValueError, match="a size"):
        Settings(max_memory="most").service()
