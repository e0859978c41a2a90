"""What a server does about an engine that died: the parent starts it again, windows come back, what ended it is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.server.calls import wait_for
from adapters.server.serving import serving
from ctxwin import Chunk
from ctxwin.errors import EngineFailed
from ctxwin_client import RemoteWindow
from ctxwin_client.errors import Quarantined, TooManyWindows, UnknownWindow
from ctxwin_server.app.quarantine import QUARANTINE_S, Quarantine
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.process.supervisor import DIED
from ctxwin_server.protocol.limits import Limits

PARENT = """
import signal, sys
from ctxwin_server.process import supervisor
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where nohup runs the tests it is ignored
supervisor._GROUP_S = 0.5
sys.exit(supervisor.supervise([sys.executable, "-c", sys.argv[2], *sys.argv[3:]], int(sys.argv[1]), pause=0.05))
"""
CHILD = """
import os, signal, socket, subprocess, sys, threading, time
from pathlib import Path
from ctxwin_server.process.supervisor import journal
runs = Path(sys.argv[1])
print(os.getpid(), file=runs.open("a"), flush=True)
suspects, statuses = journal(), sys.argv[3].split(",")
with socket.socket() as sock:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", int(sys.argv[2])))
    sock.listen()
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(orphan.pid, file=runs.open("a"), flush=True)
    ran = suspects.read_text() if suspects.exists() else ""
    suspects.write_text(ran + "x")
    status = statuses[len(ran)]
    if status == "wait":
        time.sleep(600)
    if int(status) < 0:
        os.kill(os.getpid(), -int(status))
        time.sleep(600)
    os._exit(int(status))
"""


def parent(runs: Path, restarts: int, *statuses: str) -> subprocess.Popen[bytes]:
    from adapters.server.vllm.processes import free_port

    command = [sys.executable, "-c", PARENT, str(restarts), CHILD, str(runs), str(free_port()), ",".join(statuses)]
    return subprocess.Popen(command, start_new_session=True)


def pids(runs: Path) -> list[int]:
    return [int(line) for line in runs.read_text().split()] if runs.exists() else []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("restarts", "statuses", "status", "started"),
    [
        (3, (DIED, DIED, 0), 0, 3), (3, (DIED, 3), 3, 2), (1, (DIED, DIED, 0), DIED, 2), (5, (2,), 2, 1),
        (3, (-9, -9, 0), 0, 3), (1, (-9, -9, 0), 137, 2), (3, (-11, -7, -6, 4), 4, 4), (3, (-15,), 143, 1),
    ],
)  # fmt: skip
def test_only_a_server_that_was_killed_or_whose_engine_died_is_started_again(
    tmp_path: Path, restarts: int, statuses: tuple[int, ...], status: int, started: int
) -> None:
    with parent(tmp_path / "runs", restarts, *map(str, statuses)) as process:
        assert process.wait(60) == status
    made = pids(tmp_path / "runs")
    assert len(made) == 2 * started and not any(map(is_running, made))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_parent_and_child_end_together(tmp_path: Path, number: int) -> None:
    """The signal reaches the child; a parent that is killed takes it along. Ended as asked for is no failure."""
    with parent(tmp_path / "runs", 3, str(DIED), "wait") as process:
        wait_for(lambda: len(pids(tmp_path / "runs")) == 4)
        process.send_signal(number)
        status = process.wait(60)
    assert status == {signal.SIGKILL: -9, signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGHUP: 129}[number]
    *_, child, orphan = pids(tmp_path / "runs")
    wait_for(lambda: not is_running(child))
    if number == signal.SIGKILL:  # nobody is left to look after what the child started
        os.kill(orphan, signal.SIGKILL)
    assert len(pids(tmp_path / "runs")) == 4
    wait_for(lambda: not is_running(orphan))


class Engine:
    """Stands for the engine of several processes, one after another."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.now = self.elapsed = 1000.0
        self.restart()

    def restart(self) -> None:
        self.dead = False
        self.quarantine = Quarantine(self.journal, lambda: self.dead, lambda: self.now, lambda: self.elapsed)

    def die_during(self, *names: str) -> None:
        """The engine dies while all of ``names`` run."""
        contexts = [self.quarantine.running(name) for name in names]
        for context in contexts:
            context.__enter__()
        self.dead = True
        for context in reversed(contexts):
            context.__exit__(EngineFailed, EngineFailed("died"), None)
        with pytest.raises(EngineFailed), self.quarantine.running("late"):
            pass
        self.restart()

    def serves(self, name: str) -> bool:
        try:
            with self.quarantine.running(name):
                return True
        except Quarantined:
            return False


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "journal.json")


def test_a_request_that_ends_the_engine_twice_is_refused_for_a_while(engine: Engine) -> None:
    engine.die_during("killer")
    assert engine.serves("other")
    engine.die_during("killer")
    with pytest.raises(Quarantined, match=r"until 1970-01-01 01:16:40 UTC"), engine.quarantine.running("killer"):
        pass
    assert engine.serves("other")
    engine.restart()
    assert not engine.serves("killer")
    engine.now += QUARANTINE_S
    assert engine.serves("killer")


def test_a_bystander_of_deaths_is_served(engine: Engine) -> None:
    engine.die_during("killer", "bystander", "another")
    assert engine.serves("bystander")  # alone: it is cleared
    engine.die_during("killer")  # it runs alone as well
    assert engine.serves("bystander") and engine.serves("another") and not engine.serves("killer")


def test_a_bystander_of_two_deaths_is_not_refused_for_what_it_shared_with_others(engine: Engine) -> None:
    for _ in range(3):
        engine.die_during("bystander", "another")
        assert engine.serves("bystander") and engine.serves("another")


def test_a_try_that_fails_clears_nobody(engine: Engine) -> None:
    """Else whoever ends the engine would leave early in between."""
    engine.die_during("killer")
    with pytest.raises(ValueError), engine.quarantine.running("killer"):
        raise ValueError("the client has left")
    engine.die_during("killer")
    assert not engine.serves("killer")


def test_a_suspect_runs_alone_and_others_after_it(engine: Engine) -> None:
    engine.die_during("suspect", "other")
    engine.quarantine._clear("other")
    order, released = [], threading.Event()

    def run(name: str) -> None:
        with engine.quarantine.running(name):
            order.append(name)
            if name in ("first", "suspect"):
                assert released.wait(10)

    with ThreadPoolExecutor() as pool:
        done = [pool.submit(run, "first")]
        wait_for(lambda: order == ["first"])
        done.append(pool.submit(run, "suspect"))
        wait_for(lambda: engine.quarantine._next is not None)
        done.append(pool.submit(run, "other"))
        time.sleep(0.2)
        assert order == ["first"]
        released.set()
        for future in done:
            future.result(10)
    assert order == ["first", "suspect", "other"]
    engine.die_during("suspect", "other")  # it was cleared: one death more is its first
    assert engine.serves("suspect")


def test_a_suspect_that_runs_for_long_holds_nobody_up(engine: Engine) -> None:
    engine.die_during("suspect")
    with engine.quarantine.running("suspect"):
        engine.elapsed += 61
        assert engine.serves("other")


@pytest.mark.parametrize("jump", [-QUARANTINE_S, QUARANTINE_S])
def test_a_jump_of_the_clock_neither_prolongs_nor_ends_a_wait(engine: Engine, jump: float) -> None:
    engine.die_during("suspect")
    enters = engine.quarantine._enter
    with engine.quarantine.running("other"):
        assert not enters("suspect", engine.elapsed)  # its client leaves meanwhile
    engine.now += jump
    engine.elapsed += 2
    assert enters("other", engine.elapsed)
    engine.restart()
    engine.die_during("another")
    with engine.quarantine.running("another"):
        engine.now += jump
        enters = engine.quarantine._enter
        assert not enters("other", engine.elapsed)
        engine.elapsed += 61
        assert enters("other", engine.elapsed)


def test_a_clock_that_is_set_back_far_refuses_nothing_forever(engine: Engine) -> None:
    engine.die_during("killer")
    engine.die_during("killer")
    engine.now -= QUARANTINE_S
    assert not engine.serves("killer")
    engine.now -= QUARANTINE_S
    assert engine.serves("killer")


def test_the_journal_is_bounded_and_names_no_content(engine: Engine) -> None:
    engine.die_during(*(f"{i:064x}" for i in range(1500)))
    assert len(engine.quarantine._suspects) == 1024 and engine.journal.stat().st_size < 200_000


CHUNKS = [Chunk.text(f"The door of room {i} is open. ") for i in range(6)]


def test_windows_that_were_open_when_the_server_was_killed_come_back(tmp_path: Path) -> None:
    """The first server is not closed before the second opens the store, as if it had been killed."""
    tenants = [Tenant(name=name, keys=[f"key-{name}"]) for name in ("acme", "bolt")]
    store = f"disk:{tmp_path}"
    with serving(tenants=tenants, store=store) as killed:
        acme = killed.client("key-acme", max_retries=0)
        window, gone = RemoteWindow(acme, "h", 900), RemoteWindow(acme, "gone", 900)
        ids = window.extend(CHUNKS[:4])
        window.evict(ids[1])
        answer = window.ask("Which door is open?", 4, remember=True)
        branch = window.fork()
        branch.evict(ids[0])
        gone.append(CHUNKS[0])
        gone.close()
        expected = window.ask("Which door is open?", 4).text
        with serving(tenants=tenants, store=store) as server:
            client = server.client("key-acme", max_retries=0)
            back, other = RemoteWindow.attach(client, window.id), RemoteWindow.attach(client, branch.id)
            assert back.ids == window.ids and back.evicted == (ids[1],) and back.version == window.version
            assert other.ids == branch.ids
            assert back.ask("Which door is open?", 4).text == expected
            back.check()
            window.evict(ids[0])
            assert back.ids == window.ids == tuple(ids[2:]) + window.ids[2:], (
                "whoever is asked reads the newest version"
            )
            assert answer.text
            with pytest.raises(UnknownWindow):
                RemoteWindow.attach(client, gone.id)
            with pytest.raises(UnknownWindow):
                RemoteWindow.attach(server.client("key-bolt", max_retries=0), window.id)
            back.close()
        with serving(tenants=tenants, store=store) as server, pytest.raises(UnknownWindow):
            RemoteWindow.attach(server.client("key-acme", max_retries=0), window.id)


def test_reading_a_window_writes_nothing() -> None:
    with serving() as server:
        window = RemoteWindow(server.client(), "h", 900)
        window.extend(CHUNKS[:2])
        store = server.engines[""].store
        before = store.get(f"window/{window.id}")
        assert window.plan() and window.snapshot()
        assert store.get(f"window/{window.id}") is before and store.stats().leased
        window.append(CHUNKS[2])
        assert store.get(f"window/{window.id}") != before
        window.close()
        assert not list(store.list("window/")) and store.stats().leased == 0


def test_windows_of_all_tenants_together_are_bounded() -> None:
    tenants = [Tenant(name=name, keys=[f"key-{name}"]) for name in ("acme", "bolt")]
    with serving(Limits(max_windows_total=3), tenants) as server:
        acme, bolt = (server.client(f"key-{t.name}", max_retries=0) for t in tenants)
        of_acme = [RemoteWindow(acme, f"a{i}") for i in range(3)]
        of_bolt = RemoteWindow(bolt, "b")
        counts = [len(server.service.tenant_state(t.name).windows) for t in tenants]
        assert counts == [2, 1]  # who has most makes room
        assert [RemoteWindow.attach(acme, w.id).system_prompt for w in of_acme] == ["a0", "a1", "a2"]
        windows: Any = server.service.tenant_state("acme").windows
        with (
            windows.using(of_acme[0].id), windows.using(of_acme[1].id), windows.using(of_acme[2].id),
            pytest.raises(TooManyWindows, match="--max-windows-total"),
        ):  # fmt: skip
            RemoteWindow.attach(bolt, of_bolt.id).append(CHUNKS[0])
