"""Servers that a study asks: `ctxwin serve`, and any module of Python that serves HTTP."""

import contextlib
import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from ctxwin_evals.bench.model import SEVEN_B, Sizes, ensure_model

RANDOM = {"random": Sizes(), "random-7b": SEVEN_B}
"""Random models that a study may name instead of a folder."""


@contextlib.contextmanager
def running_server(model: str, arguments: list[str]) -> Iterator[tuple[str, int]]:
    """``ctxwin serve MODEL``, until the block ends: its address and its process. A name of `RANDOM` is a random model."""
    model = str(ensure_model(RANDOM[model], 0)[0]) if model in RANDOM else model
    with running_module(["ctxwin", "serve", model, "--restarts", "0", *arguments]) as server:
        yield server


@contextlib.contextmanager
def running_module(command: list[str], environment: dict[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """A module of Python that serves HTTP, until the block ends: its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            for _ in range(600):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the server ended: {log.read()[-4000:].decode(errors='replace')}")
                try:
                    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                        connection.request("GET", "/health")
                        if connection.getresponse().status == 200:
                            break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(60)
