"""A Redis server for a test: on a loopback port of its own, without persistence."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Self

from system import need_redis


class Server:
    """A ``redis-server`` that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.program, self.folder = need_redis(), folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        import redis

        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": self.folder}
        command = [self.program, *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with closing(redis.Redis(port=self.port)) as client:
            for _ in range(500):
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self.process.poll() is None, "redis-server ended at once"
                    time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
