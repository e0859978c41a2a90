"""WebSockets through a fleet's front, to a replica in a process of its own; a socket to it directly is the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ctxwin_ray.sockets import RECONNECT, Address, relay

MOST_BYTES = 1 << 20
REPLICA = """
import asyncio, json
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import WebSocketRoute
from ctxwin_ray.sockets import listening

async def echo(socket):
    seen = {**dict(socket.query_params), "path": socket.url.path, "client": socket.client and socket.client.host}
    if socket.headers.get("authorization") != "Bearer key":
        await socket.send_denial_response(JSONResponse({"error": "no key"}, 401))
        return
    await socket.accept()
    await socket.send_json({**seen, "secret": socket.headers.get("x-ctxwin-fleet")})
    if "stall" in seen:
        await asyncio.sleep(600)
    while (message := await socket.receive())["type"] == "websocket.receive":
        text, data = message.get("text"), message.get("bytes")
        if text and text.startswith("close "):
            await socket.close(int(text.split()[1]), "as told")
            break
        if text and text.startswith("flood "):
            sent = 0
            try:
                while sent < int(text.split()[1]):
                    await socket.send_bytes(bytes(1 << 16))
                    sent += 1
                    print(json.dumps({"sent": sent}), flush=True)
            except Exception:
                break
            continue
        await (socket.send_text(text) if data is None else socket.send_bytes(data))
    print(json.dumps({"closed": message.get("code")}), flush=True)

async def main():
    async with listening(Starlette(routes=[WebSocketRoute("/v1/{rest:path}", echo)]), "127.0.0.1", %d) as address:
        print(json.dumps(vars(address)), flush=True)
        await asyncio.to_thread(input)

asyncio.run(main())
"""


@dataclass
class Replica:
    """A replica's process, and where it listens."""

    process: subprocess.Popen[str]
    address: Address
    lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def listen(self) -> None:
        """Keep what the process says for `said`, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def said(self, seconds: float = 60.0) -> dict[str, int]:
        return dict(json.loads(self.lines.get(timeout=seconds)))


@contextlib.contextmanager
def replica() -> Iterator[Replica]:
    command = [sys.executable, "-c", REPLICA % MOST_BYTES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            running = Replica(process, Address(**json.loads(process.stdout.readline())))
            threading.Thread(target=running.listen).start()
            yield running
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def front(address: Address) -> AsyncIterator[str]:
    """A front that passes every socket on to one replica; its URL."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        headers = [(k, v) for k, v in socket.headers.raw if k not in (b"host", b"connection", b"upgrade")]
        await relay(socket, address, headers, MOST_BYTES)

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, ws="websockets-sansio"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def dial(url: str, key: str = "key", **options: int) -> connect:
    return connect(
        url,
        additional_headers={"authorization": f"Bearer {key}"},
        proxy=None,
        max_size=None,
        compression=None,
        **options,
    )


async def closing(socket: ClientConnection) -> tuple[int, str]:
    """How the other side closes a socket."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            await asyncio.wait_for(socket.recv(), 60)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_messages_pass_both_ways_as_they_are() -> None:
    async def main(running: Replica) -> None:
        async with front(running.address) as url, dial(f"{url}/v1/windows/a%2Fb/live?reserve=3") as socket:
            head = json.loads(await socket.recv())
            assert head == {"reserve": "3", "path": "/v1/windows/a/b/live", "client": "127.0.0.1", "secret": None}
            messages: list[str | bytes] = ["text", b"\x00bytes", "", b"", "ä" * 1000, bytes(MOST_BYTES - 8)]
            for message in messages:
                await socket.send(message)
                assert await asyncio.wait_for(socket.recv(), 60) == message
            for message in messages:
                await socket.send(message)
            assert [await asyncio.wait_for(socket.recv(), 60) for _ in messages] == messages

    with replica() as running:
        asyncio.run(main(running))


def test_close_codes_are_passed_on() -> None:
    async def main(running: Replica) -> None:
        async with front(running.address) as url:
            for code in (1000, 1008, 1011, 3000, 4999):
                async with dial(f"{url}/v1/x") as socket:
                    await socket.send(f"close {code}")
                    assert await closing(socket) == (code, "as told")
                await asyncio.to_thread(running.said)
                async with dial(f"{url}/v1/x") as socket:
                    await socket.recv()
                    await socket.close(code)
                assert await asyncio.to_thread(running.said) == {"closed": code}
            socket = await dial(f"{url}/v1/x")
            await socket.recv()
            socket.transport.abort()
            assert "closed" in await asyncio.to_thread(running.said), "a client that is gone leaves nothing open"

    with replica() as running:
        asyncio.run(main(running))


def test_a_refusal_is_the_replicas() -> None:
    async def main(running: Replica) -> None:
        async with front(running.address) as url:
            with pytest.raises(InvalidStatus) as refused:
                await dial(f"{url}/v1/x", "another")
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body or b"") == {"error": "no key"}
        with pytest.raises(InvalidStatus):  # whoever is not of the fleet
            await dial(f"ws://127.0.0.1:{running.address.port}/v1/x")

    with replica() as running:
        asyncio.run(main(running))


def test_a_client_is_told_to_connect_again_when_its_replica_ends() -> None:
    async def main(running: Replica, *, killed: bool) -> None:
        async with front(running.address) as url, dial(f"{url}/v1/x?stall=1") as socket:
            await socket.recv()
            if killed:
                running.process.kill()
            else:
                assert running.process.stdin is not None
                running.process.stdin.write("\n")
                running.process.stdin.flush()
            code, reason = await closing(socket)
            assert code == RECONNECT == 1012 and (not killed or "connect again" in reason)

    for killed in (True, False):
        with replica() as running:
            asyncio.run(main(running, killed=killed))


def test_who_reads_slowly_slows_its_sender() -> None:
    """Neither the front nor a replica takes what the other side does not: senders stop once buffers are full."""
    frames = 1000  # 64 MB

    async def main(running: Replica) -> None:
        async with front(running.address) as url, dial(f"{url}/v1/x", max_queue=1) as socket:
            await socket.recv()
            await socket.send(f"flood {frames}")
            sent, last = 0, -1
            while sent != last:  # no more for a second
                last = sent
                with contextlib.suppress(queue.Empty):
                    while True:
                        sent = (await asyncio.to_thread(running.said, 1.0))["sent"]
            assert 0 < sent < frames // 2
            for _ in range(frames):
                assert len(await asyncio.wait_for(socket.recv(), 60)) == 1 << 16
        async with front(running.address) as url, dial(f"{url}/v1/x?stall=1") as socket:
            await socket.recv()
            with pytest.raises(TimeoutError):
                for _ in range(frames):
                    await asyncio.wait_for(socket.send(bytes(1 << 16)), 2.0)
            socket.transport.abort()
            running.process.kill()  # else the front waits until the replica's ping is not answered

    with replica() as running:
        asyncio.run(main(running))
