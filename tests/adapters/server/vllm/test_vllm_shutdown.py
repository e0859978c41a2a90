"""Ends of ``ctxwin serve`` with vLLM: ordered, by a death of vLLM, and by a request that vLLM dies of."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError

from adapters.server.vllm.processes import Process, descendants, running_server
from adapters.server.vllm.program import CHUNKS, HEADER, question
from ctxwin.errors import EngineFailed
from ctxwin_client import RemoteWindow
from ctxwin_client.errors import Quarantined
from ctxwin_server.process.supervisor import DIED
from system import running
from waiting import wait_until


def test_it_ends_cleanly_and_keeps_snapshots(server: Process) -> None:
    """Last: the server is gone afterwards."""
    window = RemoteWindow(server.client(), HEADER, 900)
    window.append(CHUNKS[0])
    group = server.process.pid
    processes = descendants(group)
    server.process.terminate()
    assert server.process.wait(60) == 0
    for _ in range(100):
        if not running(group, os.getpgid):
            break
        time.sleep(0.1)
    assert not running(group, os.getpgid), "a process of the server is left"
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_chats_that_vllm_begins_at_once_are_preempted_and_lose_their_vllm(tmp_path: Path) -> None:
    """Their windows are updated while they run; every answer is the one without a window."""
    few = ("--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "25")
    with running_server(tmp_path, *few, restarts=1) as server, ThreadPoolExecutor(4) as pool:

        def ask(messages: list[Any], windows: str, **options: Any) -> Any:
            extra = {"ignore_eos": True, "ctxwin": {"windows": windows, "fidelity": {"mode": "exact"}}}
            asked = {"model": "tiny", "temperature": 0, "max_tokens": 60, **options}
            return server.client().chat.completions.create(messages=messages, extra_body=extra, **asked)

        def converse(j: int) -> list[Any]:
            messages: list[Any] = [
                {"role": "system", "content": f"You watch door {j}, and tell what has changed there."}
            ]
            for turn in range(3):
                messages.append({"role": "user", "content": f"Step {turn}: a light is on. What is there?"})
                answer = ask(messages, "auto").choices[0].message.content
                messages.append({"role": "assistant", "content": answer})
            return messages

        def assert_right(messages: list[Any]) -> None:
            for i in range(2, len(messages), 2):
                assert ask(messages[:i], "off").choices[0].message.content == messages[i]["content"]

        talks = [*pool.map(converse, range(4))]
        assert server.metrics()['vllm:num_preemptions_total{engine="0",model_name="tiny"}'] > 0
        for messages in talks:
            assert_right(messages)
        turn = [*talks[0], {"role": "user", "content": "And now?"}]
        stream = iter(ask(turn, "auto", stream=True, max_tokens=200))
        next(stream)
        (engine,) = [
            pid for pid in descendants(server.process.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(APIError):
            for _ in stream:
                pass
        assert wait_until(lambda: "starting again" in server.log.read_text(), 60)
        server.wait()
        for _ in range(2):  # what the dead one had read back, and nothing else, is served
            turn.append({"role": "assistant", "content": ask(turn, "auto").choices[0].message.content})
            turn.append({"role": "user", "content": "And now?"})
        assert_right(turn[:-1])
        assert not server.metrics().get('ctxwin_chats_total{behind="failed",tenant=""}')


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
