"""Two servers of the bundled model on this machine, and windows that outlive one of them (needs redis-server).

A window is edited and asked, the server that owns it is killed, and the other one goes on with every edit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import psutil
import redis
from openai import OpenAI

from ctxwin import Chunk
from ctxwin_client import RemoteWindow
from ctxwin_ray import FleetArguments
from ctxwin_ray.run import running

REDIS, PORT = 6398, 8398


def main() -> None:
    """Runs the demonstration."""
    if shutil.which("redis-server") is None:
        sys.exit("a fleet needs a Redis; install redis-server")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = ["redis-server", "--port", str(REDIS), "--save", "", "--dir", folder]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(server.terminate)
        while True:
            try:
                redis.Redis(port=REDIS).ping()
                break
            except redis.ConnectionError:
                time.sleep(0.1)
        begin = time.monotonic()
        store = f"tiered:memory:,redis://127.0.0.1:{REDIS}/0"
        arguments = FleetArguments(
            model="tiny", vllm=["--max-model-len", "2048"], settings={"store": store}, replicas=2, cpus=0.5
        )
        url = stack.enter_context(running(arguments, port=PORT))
        print(f"two replicas answer at {url} after {time.monotonic() - begin:.0f} s")
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8)
        windows = [RemoteWindow(client, "You watch doors.", 1500) for _ in range(4)]
        for window in windows:
            window.extend([Chunk.text(f"The door of room {i} is open. ") for i in range(6)])
            window.ask("Which door is open?", 4)
        workers = [
            p for p in psutil.Process().children(recursive=True) if "ray::ServeReplica:ctxwin:replica" in p.cmdline()[0]
        ]
        workers[0].send_signal(signal.SIGKILL)
        print(f"replica with process {workers[0].pid} is killed")
        for window in windows:
            begin = time.monotonic()
            answer = window.ask("Which door is open?", 4)
            usage = answer.usage
            print(
                f"window {window.id}: {len(window.ids)} chunks, "
                f"{usage.computed_tokens} of {usage.prompt_tokens} tokens computed, "
                f"{time.monotonic() - begin:.2f} s"
            )


if __name__ == "__main__":
    main()
