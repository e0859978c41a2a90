"""A fleet from a file, as `serve run` takes it: two replicas of which one is killed while its windows are in use."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed; run pip install 'ctxwin[ray]'")

import psutil
from openai import OpenAI

from ctxwin import Chunk
from ctxwin.errors import EngineFailed
from ctxwin_client import LiveStream, RemoteWindow
from ctxwin_client.errors import UnknownWindow
from ctxwin_ray.hints import window_prefix
from store.redis_server import Server as Redis

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
PREFIX = len(window_prefix("any"))
FILE = """
http_options: {{port: {port}}}
applications:
  - name: ctxwin
    import_path: ctxwin_ray:fleet
    args:
      model: tiny
      replicas: 2
      cpus: 0.5
      settings: {{store: "tiered:memory:,{redis}", windows: auto}}
      vllm: ["--max-model-len", "2048"]
"""


@contextlib.contextmanager
def deployed(folder: Path, redis: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "fleet.yaml").write_text(FILE.format(port=port, redis=redis))
    program = str(Path(sys.executable).with_name("serve"))
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen([program, "run", "fleet.yaml"], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
                if answer.status == 200:
                    break
            log_so_far = (folder / "log.txt").read_text()
            failed = "Traceback" in log_so_far or process.poll() is not None
            assert not failed and time.monotonic() < until, log_so_far[-8000:]
            time.sleep(0.5)
        yield url, process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()


def test_windows_of_a_fleet_from_a_file_outlive_a_replica(tmp_path: Path) -> None:
    with Redis(tmp_path) as redis, deployed(tmp_path, redis.url) as (url, process):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10)
        replicas, until = Counter[str](), time.monotonic() + 300
        windows: list[RemoteWindow] = []
        while len(windows) < 4:  # two of each replica; the fleet answers once it has one
            assert time.monotonic() < until, f"new windows go to the least busy replica, which is either: {replicas}"
            window = RemoteWindow(client, "You watch doors.", 1500)
            replicas[window.id[:PREFIX]] += 1
            if replicas[window.id[:PREFIX]] <= 2:
                windows.append(window)
            else:
                window.close()
                time.sleep(0.2)
        for i, window in enumerate(windows):
            window.extend([Chunk.text(f"The door of room {i}{j} is open. ") for j in range(5)])
        before = [window.ask("Which door is open?", 6).text for window in windows]
        made = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "which door?"}], max_tokens=2
        )
        assert made.usage is not None and made.usage.model_dump()["ctxwin"]["lanes"]
        branches = [window.fork() for window in windows]
        streams = [LiveStream(client, branch.id) for branch in branches]
        for stream, text in zip(streams, before, strict=True):
            stream.__enter__()
            assert stream.ask("Which door is open?", 6).text == text
        with pytest.raises(UnknownWindow), LiveStream(client, "nowhere"):
            pass
        processes = [p for p in psutil.process_iter(["cmdline"]) if _is_replica(p)]
        assert len(processes) == 2
        os.kill(processes[0].pid, signal.SIGKILL)
        assert [window.ask("Which door is open?", 6).text for window in windows] == before
        ended = 0
        for branch, stream, text in zip(branches, streams, before, strict=True):
            try:
                assert stream.ask("Which door is open?", 6).text == text
            except EngineFailed as error:
                assert "1012" in str(error) and "connect again" in str(error)
                ended += 1
                with LiveStream(client, branch.id) as again:
                    assert again.ask("Which door is open?", 6).text == text
            stream.__exit__(None, None, None)
        assert ended, "a replica took its streams with it"
        for window in windows:
            window.evict(window.ids[0])
            window.check()
        assert process.poll() is None


def _is_replica(process: psutil.Process) -> bool:
    return any("ray::ServeReplica:ctxwin:replica" in word for word in process.info["cmdline"] or ())
