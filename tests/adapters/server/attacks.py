"""Attacks on a running server, and a bystander who asks all the while.

Everything goes over HTTP, so that the same attacks run against any version of the server:

    python tests/adapters/server/attacks.py --tree /path/to/another/checkout [ATTACK ...]

starts ``ctxwin serve`` from that checkout and prints one line of JSON for each attack. Tests take `besieged` and `ATTACKS`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ctxwin.engines.encoding.checkpoint import open_checkpoint
from ctxwin.hashing import digest
from ctxwin.tiny import checkpoint_dir, world

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
FRAMES = world.make_stream(seed=4, n_frames=3)
MARKS = [int(frame.marks[0]) for frame in FRAMES]


def png(pixels: np.ndarray) -> str:
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def picture(i: int, text: str = "") -> dict[str, str]:
    return {"type": "image", "image": png(world.render(FRAMES[i])), "text": text}


def text(of: str) -> dict[str, str]:
    return {"type": "text", "text": of}


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
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


LOAD = ("08_", "21_", "22_", "26_", "29_")
"""Attacks that are no more than many requests, each of which the server owes an answer."""


def crowd(at: Victim, count: int = 64) -> None:
    """As many streams at once as a tenant may ask for by default, all of them read, and nothing odd about them."""
    mallory = at.user("mallory")

    def asks(i: int) -> None:
        mallory.chat(f"tell a story of {i}", max_tokens=200, ignore_eos=True, stream=True)

    together([lambda i=i: asks(i) for i in range(count)])


Attack = Callable[[Victim], None]
ATTACKS: dict[str, Attack] = {}
"""By name: what breaks the promise raises AssertionError. Names start with the number in the table of docs/security.md."""


OPEN: dict[str, Attack] = {}
"""Attacks on a server with one key and without tenants."""


def attack(made: Attack) -> Attack:
    (OPEN if made.__name__.startswith("open_") else ATTACKS)[made.__name__.partition("_")[2]] = made
    return made


def refused(status: int, answer: Any) -> None:
    assert status in REFUSED, (status, str(answer)[:300])


@attack
def attack_01_far_positions(at: Victim) -> None:
    """Six frames at 1e-6 a second reach positions beyond every cache of angles."""
    mallory = at.user("mallory")
    window = mallory.window()
    frames = [png(world.render(FRAMES[i % 3])) for i in range(6)]
    for fps in (1e-6, 1e-300, 1e300):
        added = mallory.call(f"/v1/windows/{window}/append", {"chunk": {"type": "video", "frames": frames, "fps": fps}})
        asked = mallory.ask(window, "what moves?")
        assert asked[0] in (200, *REFUSED), asked
        refused(*added)
    mallory.close(window)


STORY = "the rain went on and a red car stood by the gate of the house while nobody was there to see it {}. "


def long_text(seed: int, backwards: bool = False) -> dict[str, str]:
    """About 500 tokens that nobody has sent before; as many with other KV behind them when ``backwards``."""
    told = [STORY.format(f"{seed} {i}") for i in range(9)]
    return text("".join(told[::-1] if backwards else told))


@attack
def attack_02_forged_snapshots(at: Victim) -> None:
    """KV of another place under the provenance of an exact one, in the tenant of those who are to be served it.

    The true provenance is learnt in another tenant, where nobody has reason to object.
    """
    mallory, lab = at.user("mallory"), at.user("laboratory")
    wrong, tried = [], 3
    for _ in range(tried):
        seed = random.getrandbits(40)
        shown, hidden, later = long_text(seed), long_text(seed, backwards=True), long_text(seed + 1)
        exact = {"fidelity": {"mode": "exact"}}
        windows = [(lab, lab.window(chunks=[shown, later], **exact))]
        windows.append((mallory, mallory.window(chunks=[hidden, later], **exact)))
        states = []
        for who, window in windows:
            assert who.ask(window, "why?")[0] == 200
            states.append(who.call(f"/v1/windows/{window}/snapshot")[1])
        forged, foreign = states
        first, second = forged["placed"]
        first["kv"] = None
        first["seen"] = False
        second["kv"] = {
            **foreign["placed"][1]["kv"], "provenance": second["kv"]["provenance"], "antecedents": [first["id"]]
        }  # fmt: skip
        forged["window"] = "0" * 12
        forged["fidelity"]["mode"] = "patched"
        status, made = mallory.call("/v1/windows", {"snapshot": forged})
        if status == 200:
            mallory.ask(made["id"], "why?")
            windows.append((mallory, made["id"]))
        else:
            refused(status, made)
        truth = lab.ask(windows[0][1], "what stood there?", 1, logprobs=5)[1]["first_token_logprobs"]
        windows.append((mallory, mallory.window(chunks=[shown, later], **exact)))
        status, served = mallory.ask(windows[-1][1], "what stood there?", 1, logprobs=5)
        assert status == 200, served
        mine = served["first_token_logprobs"]
        gaps = [abs(float(p) - float(mine[i])) if i in mine else 9.0 for i, p in truth.items()]
        if max(gaps) > 1e-3:
            wrong.append(max(gaps))
        for who, window in windows:
            who.close(window)
    assert not wrong, f"{len(wrong)} of {tried} exact windows are off by up to {max(wrong):.3g} nats"


def named_picture(mallory: Client, victim: Client, tenant: str) -> float:
    """Sends another picture under the names that might follow from content, then asks a window that shows the true one.

    Returns:
        By how many nats the window's answer is off a plain chat's about the same picture, which has no name.
    """
    seed = random.getrandbits(30)
    shown, other = (png(world.render(world.make_stream(seed=seed + i, n_frames=1)[0])) for i in (0, 1))
    question, prompt = f"what is at the top left of {seed}?", f"You watch camera {seed}."
    window = victim.window(prompt, fidelity={"mode": "exact"}, chunks=[{"type": "image", "image": shown}])
    state = victim.call(f"/v1/windows/{window}/snapshot")[1]
    part = next(part for part in state["placed"][0]["chunk"]["parts"] if part["kind"] == "media")
    identity = open_checkpoint(checkpoint_dir()).identity("float32", "vllm")
    assert digest("vllm", identity) == state["engine"], "the attack must know the model as its attacker would"
    key = digest("embed", identity, part["content"], list(part["shape"]), "image", None)
    for name in (key, digest("tenant", tenant, key)):
        forged = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{other}"}, "uuid": name}]
        for path in ("/v1/chat/completions", "/invocations"):
            message = {"role": "user", "content": [*forged, text("what is it?")]}
            status, answer = mallory.call(path, {"model": "tiny", "max_tokens": 1, "messages": [message]})
            assert status in (200, *REFUSED), answer
    status, asked = victim.ask(window, question, 1, logprobs=5)
    assert status == 200, asked
    victim.close(window)
    url = f"data:image/png;base64,{shown}"
    messages = [
        {"role": "system", "content": prompt},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text(question)]},
    ]
    body = {
        "model": "tiny",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "messages": messages,
    }
    status, told = victim.call("/v1/chat/completions", body)
    assert status == 200, told
    best = [token["logprob"] for token in told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    mine = sorted(map(float, asked["first_token_logprobs"].values()), reverse=True)
    return max(abs(one - two) for one, two in zip(mine, sorted(best, reverse=True), strict=False))


@attack
def attack_03_names_of_media(at: Victim) -> None:
    """Another picture under the name that a window's picture might have inside vLLM."""
    mallory = at.user("mallory")
    assert named_picture(mallory, mallory, "mallory") < 1e-3


@attack
def attack_05_orders_without_end(at: Victim) -> None:
    """More orders than eight chunks can have; the client leaves after four seconds."""
    mallory = at.user("mallory")
    window = mallory.window(chunks=[text(f"word {i}") for i in range(9)])
    ids = mallory.call(f"/v1/windows/{window}/summary")[1]["ids"]
    before = time.monotonic()
    status, answer = mallory.call(f"/v1/windows/{window}/prepare_orbit", {"ids": ids[:8], "orders": 50_000}, timeout=4)
    refused(status, answer)
    assert time.monotonic() - before < 2
    mallory.close(window)


_ENDLESS = b"the quick brown fox " * ((8 << 20) // 20)
_WIDE = b"[]," * ((16 << 20) // 3) + b"[]]}"


@attack
def attack_06_endless_text(at: Victim) -> None:
    """8 MB to tokenise, as a chunk, a system prompt and a question."""
    mallory = at.user("mallory")
    window = mallory.window()
    for path, body in (
        ("/v1/windows", b'{"%s": "%s"}' % (mallory.prompt.encode(), _ENDLESS)),
        (f"/v1/windows/{window}/append", b'{"chunk": {"type": "text", "text": "%s"}}' % _ENDLESS),
        (f"/v1/windows/{window}/ask", b'{"query": "%s"}' % _ENDLESS),
        ("/v1/completions", b'{"model": "tiny", "prompt": "%s", "max_tokens": 1}' % _ENDLESS),
        ("/tokenize", b'{"model": "tiny", "prompt": "%s"}' % _ENDLESS),
    ):
        refused(*mallory.call(path, body))
    mallory.close(window)


@attack
def attack_07_many_small_frames(at: Victim) -> None:
    """512 frames of one pixel: 46 KB of JSON."""
    mallory = at.user("mallory")
    window = mallory.window()
    dot = png(np.zeros((1, 1, 3), np.uint8))
    video = {"type": "video", "frames": [dot] * 512}
    refused(*mallory.call(f"/v1/windows/{window}/append", {"chunk": video}))
    refused(*mallory.call(f"/v1/windows/{window}/append", {"chunk": {**video, "as_frames": True}}))
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{dot}"}}] * 512
    refused(*mallory.chat([*parts, text("?")]))
    mallory.close(window)


@attack
def attack_08_priority(at: Victim) -> None:
    """Long plain answers that claim to go first, more of them than the tenant may have at once."""
    mallory = at.user("mallory")

    def greedy(i: int) -> None:
        mallory.chat(
            f"tell a story of {i}",
            headers={"X-Vllm-Priority": "-1000", "X-Request-Id": "same"},
            max_tokens=300,
            ignore_eos=True,
            timeout=15,
        )

    together([lambda i=i: greedy(i) for i in range(300)])


def together(work: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@attack
def attack_09_pictures_that_cost(at: Victim) -> None:
    """A TIFF of one huge tile, and a progressive JPEG whose last scan comes three hundred times."""
    mallory = at.user("mallory")
    for made, media in ((_huge_tile(), "tiff"), (_many_scans(), "jpeg")):
        status, answer = mallory.call("/v1/chunks", {"type": "image", "image": base64.b64encode(made).decode()})
        refused(status, answer)
        url = f"data:image/{media};base64,{base64.b64encode(made).decode()}"
        mallory.chat([{"type": "image_url", "image_url": {"url": url}}, text("?")])


def _huge_tile() -> bytes:
    """A picture of 16 x 16 pixels in a tile of 30,000 x 30,000, compressed to nothing."""
    import struct

    tags = [
        (256, 3, 16), (257, 3, 16), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1),
        (322, 4, 30_000), (323, 4, 30_000), (324, 4, 8 + 2 + 12 * 10 + 4), (325, 4, 9),
    ]  # fmt: skip
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    rows = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return head + rows + struct.pack("<I", 0) + b"\x78\x9c\x03\x00\x00\x00\x00\x01\x00"


_SCANS: list[bytes] = []


def _many_scans() -> bytes:
    if not _SCANS:
        Image.new("L", (8000, 8000), 128).save(buffer := io.BytesIO(), "JPEG", progressive=True)
        raw = buffer.getvalue()
        last = raw[raw.rindex(b"\xff\xda") : -2]
        _SCANS.append(raw[:-2] + last * 300 + raw[-2:])
    return _SCANS[0]


@attack
def attack_10_quadratic_work(at: Victim) -> None:
    """A window of thousands of chunks, a snapshot that claims a hundred thousand frames, a body of commas."""
    mallory = at.user("mallory")
    window = mallory.window(budget=1900)
    extend = f"/v1/windows/{window}/extend"
    refused(*mallory.call(extend, {"chunks": [text("a")] * 16_000}))
    for _ in range(3):
        status, answer = mallory.call(extend, {"chunks": [text("a")] * 500})
        assert status in (200, *REFUSED), answer
    before = time.monotonic()
    status, state = mallory.call(f"/v1/windows/{window}/snapshot")
    assert status == 200
    assert mallory.call(f"/v1/windows/{window}")[0] == 200
    assert time.monotonic() - before < 10
    claimed = picture(0)
    window_of_one = mallory.window(chunks=[claimed])
    status, state = mallory.call(f"/v1/windows/{window_of_one}/snapshot")
    for part in state["placed"][0]["chunk"]["parts"]:
        if part["kind"] == "media":
            part |= {"media": "video", "shape": [100_000, *part["shape"][1:]], "fps": 2.0}
    before = time.monotonic()
    refused(*mallory.call("/v1/windows", {"snapshot": {**state, "window": "0" * 12}}))
    assert time.monotonic() - before < 2
    refused(*mallory.call(extend, b'{"chunks": [' + _WIDE))
    refused(*mallory.call("/v1/completions", b'{"model": "tiny", "prompt": [' + _WIDE))
    deep = b'{"chunk": ' * 50_000 + b"1" + b"}" * 50_000
    refused(*mallory.call(extend, deep))
    for each in (window, window_of_one):
        mallory.close(each)


@attack
def attack_13_store_is_damaged(at: Victim) -> None:
    """Whoever can write to the store's folder turns bits, cuts files and puts pipes in their place, and harms no answer."""
    if not at.store.is_dir():
        return
    chance = random.Random()
    blobs = [f for f in at.store.rglob("*") if f.is_file() and f.stat().st_size > 64 and ".db" not in f.name]
    for blob in chance.sample(blobs, min(4, len(blobs))):
        with contextlib.suppress(OSError):
            raw = bytearray(blob.read_bytes())
            how = chance.randrange(3)
            if how == 0:
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
                blob.write_bytes(raw)
            elif how == 1:
                blob.write_bytes(raw[: len(raw) // 2])
            else:
                blob.unlink()
                os.mkfifo(blob)
    time.sleep(1)


@attack
def attack_14_scores_in_any_spelling(at: Victim) -> None:
    """A whole vocabulary of log-probabilities for each token, asked for in ways that a filter may overlook."""
    ask_for_all_scores(at.user("mallory"))


def ask_for_all_scores(mallory: Client) -> None:
    plain = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for body in (
        json.dumps({**plain, "logprobs": 100_000}).encode(),
        json.dumps({**plain, "logprobs": 100_000}).replace("logprobs", "logprob\\u0073").encode(),
        json.dumps({**plain, "logprobs": -1}).encode("utf-16"),
        json.dumps({**plain, "prompt_logprobs": -1}).encode("utf-32-be"),
        json.dumps({**plain, "logprobs": "100000"}).encode(),
        json.dumps({**plain, "logprob_token_ids": list(range(50_000))}).encode(),
    ):
        refused(*mallory.call("/v1/completions", body))
    for path in ("/v1/chat/completions/batch", "/invocations", "/inference/v1/generate"):
        message = {"role": "user", "content": "x"}
        body = {"model": "tiny", "messages": [message], "max_tokens": 1, "logprobs": True, "top_logprobs": 50_000}
        refused(*mallory.call(path, body))


@attack
def attack_18_nothing_is_fetched(at: Victim) -> None:
    """Pictures by URL: of this machine's own network, and one that two tenants would find in one cache."""
    mallory, heard = at.user("mallory"), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        done = threading.Event()

        def listen() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    heard.append(connection)
                    connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            for given in (url, url.replace("http", "HTTP"), "file:///etc/passwd"):
                refused(*mallory.chat([{"type": "image_url", "image_url": {"url": given}}, text("?")]))
            window = mallory.window()
            chunk = {"type": "image", "image": url}
            refused(*mallory.call(f"/v1/windows/{window}/append", {"chunk": chunk}))
            mallory.close(window)
        finally:
            done.set()
            thread.join()
    assert not heard, "the server fetched a URL that a tenant named"


@attack
def attack_19_numbers_out_of_range(at: Victim) -> None:
    """Numbers that no type holds are the client's error, and never 500."""
    mallory = at.user("mallory")
    window = mallory.window(chunks=[text("x")])
    for path, body in (
        ("/v1/windows", b'{"%s": "h", "budget_bytes": %s}' % (mallory.prompt.encode(), b"9" * 400)),
        (f"/v1/windows/{window}/remember", {"query": "q", "answer": [-1]}),
        (f"/v1/windows/{window}/remember", {"query": "q", "answer": [10**9]}),
        (f"/v1/windows/{window}/ask", {"query": "q", "temperature": 2.5}),
        (f"/v1/windows/{window}/ask", {"query": "q", "max_tokens": 10**18}),
        (f"/v1/windows/{window}/slide", {"count": 10**30}),
        (f"/v1/windows/{window}/insert", {"index": -(10**20), "chunk": text("x")}),
    ):
        refused(*mallory.call(path, body))
    mallory.close(window)


@attack
def attack_21_stalled_and_leaving(at: Victim) -> None:
    """Two hundred connections that send half a request, and clients that leave in the middle of an answer."""
    mallory = at.user("mallory")
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", at.port), timeout=5))
            connection.sendall(
                b"POST /v1/windows HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-mallory\r\n"
                b"Content-Type: application/json\r\nContent-Length: 50000\r\n\r\n{"
            )
        window = mallory.window(chunks=[text("a long day")])
        for i in range(10):
            body = {"query": f"go on {i}", "max_tokens": 1500, "temperature": 2.0, "seed": i, "stream": i % 2 == 0}
            mallory.call(f"/v1/windows/{window}/ask", body, timeout=0.15)
        mallory.close(window)


@attack
def attack_22_many_windows(at: Victim) -> None:
    """Windows, uploads and asks as fast as one tenant can send them."""
    mallory = at.user("mallory")

    def busy(i: int) -> None:
        for k in range(4):
            window = mallory.window(f"Watch {i} {k}.", chunks=[long_text(i * 100 + k)])
            mallory.ask(window, "what stood there?", 8)

    together([lambda i=i: busy(i) for i in range(8)])


@attack
def attack_23_template_arguments(at: Victim) -> None:
    """Arguments of the tokenizer that pad to any length, as the report of them spelled it and as it did not."""
    mallory = at.user("mallory")
    for arguments in (
        {"tokenize": True, "padding": "max_length", "max_length": 20_000_000},
        {"padding": "max_length", "max_length": 10**8, "truncation": False},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 10**7}},
        {"enable_thinking": 10**18},
        {"documents": [{"title": "a" * 9, "text": 10**12}]},
        {"chat_template": "{{ 'x' * 10 ** 9 }}"},
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": arguments}
            refused(*mallory.call(path, body))


@attack
def attack_24_parts_by_their_fields(at: Victim) -> None:
    """Media in parts that say they are something else: what counts pixels and URLs by the type overlooks them."""
    mallory = at.user("mallory")
    dot = f"data:image/png;base64,{png(np.zeros((8, 8, 3), np.uint8))}"
    url = "http://127.0.0.1:9/x.png"
    for part in (
        {"type": "text", "text": "x", "uuid": "u", "image_url": url},
        {"type": "text", "text": "x", "video_url": {"url": url}},
        {"type": "refusal", "refusal": "x", "image_url": {"url": url}},
        {"text": "x", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": dot}, "video_url": {"url": dot}},
        {"type": "thinking", "thinking": "x", "input_audio": {"data": dot, "format": "wav"}},
    ):
        refused(*mallory.chat([part, text("?")]))
    size = 9000  # 81 million pixels in some hundred KB
    Image.new("1", (size, size)).save(buffer := io.BytesIO(), "PNG")
    large = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    for part in (
        {"type": "image_url", "image_url": {"url": large}},
        {"type": "text", "text": "x", "image_url": {"url": large}},
        {"image_url": large},
    ):
        refused(*mallory.chat([part, text("?")]))


def trickle(at: Victim, begun: bytes, more: bytes, seconds: float = 2.0) -> None:
    """Sends ``begun`` and then ``more`` as fast as the server takes it, or as it lets us connect again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", at.port), timeout=5) as connection:
            connection.sendall(begun)
            while time.monotonic() < until:
                connection.sendall(more)


@attack
def attack_25_headers_without_end(at: Victim) -> None:
    """By somebody without a key: values, names, lines, trailers and chunk extensions that never end."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    begun = [(head + b"X: ", b"a" * 65536), (head, b"A: b\r\n" * 9000), (b"GET /", b"a" * 65536)]
    begun += [(chunked + b"1;x=", b"a" * 65536), (chunked + b"1\r\nx\r\n0\r\nX: ", b"a" * 65536)]
    together([lambda b=b, m=m: trickle(at, b, m) for b, m in begun])
    assert at.user("").call("/health", timeout=10)[0] == 200
    refused(*at.user("").call("/metrics", {}, "OPTIONS"))


@attack
def attack_26_answers_that_nobody_reads(at: Victim) -> None:
    """Forty streams whose clients read nothing, and as many connections that ask again and again without reading."""
    body = json.dumps({
        "model": "tiny", "prompt": "tell a story", "max_tokens": 200, "ignore_eos": True, "stream": True,
    }).encode()  # fmt: skip
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-mallory\r\nContent-Type: application/json\r\n"
    again = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-mallory\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            for sent in (head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body), again * 5):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", at.port), timeout=5))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                with contextlib.suppress(OSError):
                    connection.sendall(sent)
        time.sleep(3)


@attack
def attack_28_schemas_that_cost(at: Victim) -> None:
    """A schema of 250 KB, a grammar of 3,000 rules, and what costs as much by other means; each time another one."""
    mallory, seed = at.user("mallory"), random.randrange(1 << 20)
    properties = {f"p{seed}_{i}": {"enum": [f"v{i}_{k}" for k in range(20)]} for i in range(1000)}
    rules = [f'r{i} ::= [a-z]+ r{(i * 7) % 3000} "{seed}" | r{(i * 13 + 1) % 3000}? "b"' for i in range(3000)]
    root = "root ::= (" + " | ".join(f"r{i}" for i in range(3000)) + ")*"
    lengths = {f"p{i}": {"type": "string", "minLength": 5, "maxLength": 3000 + i + seed % 99} for i in range(100)}
    tool = {
        "type": "function",
        "function": {"name": f"f{seed}", "parameters": {"type": "object", "properties": lengths}},
    }
    plain = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

    answers: list[tuple[int, Any]] = []

    def asks(more: dict[str, Any]) -> None:
        answers.append(mallory.call("/v1/chat/completions", {**plain, **more}, timeout=60))

    wide = {"type": "object", "properties": properties}
    together([
        lambda made=made: asks(made)
        for made in (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}},
            {"structured_outputs": {"grammar": "\n".join([root, *rules])}},
            {"structured_outputs": {"regex": "|".join(f"[a-z]{{{i},{i + 500}}}{i}" for i in range(1, 1500))}},
            {"tools": [tool], "tool_choice": "required"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#", "$id": str(seed)}}}},
        )
    ])  # fmt: skip
    assert all(status in (200, *REFUSED) for status, _ in answers), str(answers)[:600]


@attack
def attack_29_forks_of_large_windows(at: Victim) -> None:
    """A window of hundreds of chunks is forked as fast as can be, and changed in each fork."""
    mallory = at.user("mallory")
    window = mallory.window(budget=1900, chunks=[text(f"{i}") for i in range(400)])
    made: list[str] = []
    answers: list[tuple[int, Any]] = []

    def fork(i: int) -> None:
        status, forked = mallory.call(f"/v1/windows/{window}/fork", {"system_prompt": f"Another {i}."} if i % 2 else {})
        answers.append((status, forked))
        if status == 200:
            made.append(forked["branch"]["id"])
            mallory.call(f"/v1/windows/{made[-1]}/append", {"chunk": text(f"last {i}")})

    together([lambda i=i: fork(i) for i in range(24)])
    assert all(status in (200, *REFUSED) for status, _ in answers), str(answers)[:600]
    for each in (window, *made):
        mallory.close(each)


@attack
def open_03_names_of_media(at: Victim) -> None:
    """As with tenants; the second time by somebody who has no key."""
    owner = at.user("owner")
    assert (gap := named_picture(owner, owner, "")) < 1e-3, f"a window's answer is off by {gap:.3g} nats"
    assert (gap := named_picture(at.user(""), owner, "")) < 1e-3, f"without a key, off by {gap:.3g} nats"


@attack
def open_04_without_a_key(at: Victim) -> None:
    """Everything but health and metrics."""
    stranger = at.user("")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for path in (
        "/invocations",
        "/tokenize",
        "/detokenize",
        "/v1/completions",
        "/v1/windows",
        "/v1/chunks",
        "/v1/models",
    ):
        status, answer = stranger.call(path, None if path == "/v1/models" else body)
        assert status == 401, (path, status, str(answer)[:100])


@attack
def open_14_scores_in_any_spelling(at: Victim) -> None:
    """As with tenants."""
    ask_for_all_scores(at.user("owner"))


@dataclass
class Seen:
    """What the bystander saw: seconds of each round, how many of its answers were what, and windows it had to open anew."""

    seconds: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    lost: int = 0

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.seconds, share)) if self.seconds else float("inf")


class _Rounds:
    """A small tenant: a standing window of three pictures with known answers, one that is opened anew, and a plain chat."""

    def __init__(self, port: int) -> None:
        self._user = Client(port, "Bearer key-bystander")
        self._questions = [f"color of {mark:02d}?" for mark in MARKS]
        self._chunks = [picture(i, f"t={i} s") for i in range(3)]
        self._window = self._user.window(budget=900, chunks=self._chunks)
        self._asked = self.lost = 0
        self.expected = [self._round(i) for i in range(3)]

    def _round(self, i: int) -> tuple[Any, ...]:
        """The standing window, a new one and a plain chat, each asked one small question."""
        question, told = self._questions[i], []
        told.append(self._user.ask(self._window, question))
        if told[0][0] == 410:  # its pictures were in a store that somebody has destroyed, which is said
            self.lost += 1
            self._window = self._user.window(budget=900, chunks=self._chunks)
            told[0] = self._user.ask(self._window, question)
        window = self._user.window(budget=900, chunks=self._chunks[: i + 1])
        told.append(self._user.ask(window, question))
        self._user.close(window)
        url = f"data:image/png;base64,{self._chunks[i]['image']}"
        told.append(self._user.chat([{"type": "image_url", "image_url": {"url": url}}, text(question)]))
        texts = []
        for status, answer in told:
            assert status == 200, (status, str(answer)[:200])
            texts.append(answer["text"] if "text" in answer else answer["choices"][0]["message"]["content"])
        return tuple(texts)

    def ask(self, seen: Seen) -> None:
        i = self._asked % 3
        self._asked += 1
        before = time.monotonic()
        try:
            made = self._round(i)
            seen.answers["right" if made == self.expected[i] else "wrong"] += 1
        except Exception as error:
            seen.answers[f"{type(error).__name__}: {str(error)[:120]}"] += 1
        seen.seconds.append(time.monotonic() - before)


def _asking(port: int, pipe: Connection) -> None:
    """The bystander's process: sends the expected answers, then for each number received what so many rounds saw, or for
    None what all rounds saw until the next message."""
    rounds = _Rounds(port)
    pipe.send(rounds.expected)
    with contextlib.suppress(EOFError):
        while True:
            count, seen = pipe.recv(), Seen()
            while len(seen.seconds) < (3 if count is None else count) or (count is None and not pipe.poll()):
                rounds.ask(seen)
            if count is None:
                pipe.recv()
            seen.lost, rounds.lost = rounds.lost, 0
            pipe.send(seen)


class Bystander:
    """Asks in a process of its own, so that what the attacks themselves cost does not count as the server's latency.

    Attributes:
        expected: its answers while nobody attacked.
    """

    def __init__(self, at: Victim) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_asking, args=(at.port, theirs), daemon=True)
        self._process.start()
        self.expected: list[tuple[str, ...]] = self._pipe.recv()

    def quiet(self, rounds: int) -> Seen:
        """What so many rounds see."""
        self._pipe.send(rounds)
        return self._seen()

    def begin(self) -> None:
        """Asks round after round from now on."""
        self._pipe.send(None)

    def end(self) -> Seen:
        """What it has seen since `begin`."""
        self._pipe.send("end")
        return self._seen()

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _seen(self) -> Seen:
        seen: Seen = self._pipe.recv()
        return seen


@dataclass
class Report:
    """What one attack did. ``median`` and ``p95`` are the bystander's latency over that of the quiet phases around it."""

    attack: str
    broken: str
    times: int
    answers: dict[str, int]
    lost: int
    median: float
    p95: float
    quiet_s: float
    peak: int
    alive: bool


def attempt(made: Attack, at: Victim) -> str:
    """How an attack broke a promise, or ""."""
    try:
        made(at)
    except AssertionError as error:
        return str(error)[:300] or "an assertion"
    except (TypeError, KeyError, AttributeError) as error:  # an answer of another form than expected
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def _from_afar() -> None:
    """This thread, and those that it starts, take only the processor time that nobody else wants.

    Attackers have machines of their own: what their side costs on this one is no latency of the server's.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def endure(at: Victim, bystander: Bystander, name: str, seconds: float = 6.0, rounds: int = 12) -> Report:
    """Runs one attack over and over for ``seconds`` (once at least), between two quiet phases, beside the bystander.

    Any other name is a `crowd`.
    """
    quiet = bystander.quiet(rounds)
    peak, broken, times = [at.resident()], "", 0
    done = threading.Event()

    def watches() -> None:
        _from_afar()
        while not done.wait(0.1):
            peak.append(at.resident())

    watching = threading.Thread(target=watches)
    watching.start()
    bystander.begin()
    until = time.monotonic() + seconds
    while times == 0 or (time.monotonic() < until and not broken):
        with ThreadPoolExecutor(1, initializer=_from_afar) as attacker:
            broken = attacker.submit(attempt, ATTACKS.get(name, crowd), at).result()
        times += 1
    if broken:
        time.sleep(3)
    seen = bystander.end()
    done.set()
    watching.join()
    alive = at.process.poll() is None and at.user("").call("/health", timeout=30)[0] == 200
    if alive:
        after = bystander.quiet(rounds)
        quiet.seconds += after.seconds
        seen.answers.update(after.answers)
    return Report(
        name, broken, times, dict(seen.answers), seen.lost, seen.quantile(0.5) / quiet.quantile(0.5),
        seen.quantile(0.95) / quiet.quantile(0.95), statistics.median(quiet.seconds), max(peak), alive,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", default="", help="PYTHONPATH of the server; default: this process's own")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if not given.names or "open" in given.names:
        with tempfile.TemporaryDirectory() as folder, besieged(Path(folder), tree=given.tree, tenants=False) as victim:
            for name, made in OPEN.items():
                broken = attempt(made, victim)
                print(json.dumps({"attack": f"open_{name}", "broken": broken}), flush=True)
    names = [n for n in ATTACKS if not given.names or any(n.startswith(g) for g in given.names)]
    while names:
        with tempfile.TemporaryDirectory() as folder, besieged(Path(folder), tree=given.tree) as victim:
            bystander = Bystander(victim)
            bystander.quiet(10)
            idle = victim.resident()
            print(json.dumps({"idle_mb": idle >> 20, "answers": bystander.expected}), flush=True)
            while names:
                made = endure(victim, bystander, names.pop(0), given.seconds)
                row = {**vars(made), "peak_mb": made.peak >> 20}
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
                if not made.alive or set(made.answers) != {"right"}:
                    print(json.dumps({"server": "started again", "exit": victim.process.poll()}), flush=True)
                    break
            bystander.close()


if __name__ == "__main__":
    main()
