"""Attacks by many requests, or by connections that never end."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from adapters.server.attacks.content import long_text, text
from adapters.server.attacks.victim import REFUSED, Victim, refused, together


def crowd(at: Victim, count: int = 64) -> None:
    """As many streams at once as a tenant may ask for by default, all of them read, and nothing odd about them."""
    mallory = at.user("mallory")

    def asks(i: int) -> None:
        mallory.chat(f"tell a story of {i}", max_tokens=200, ignore_eos=True, stream=True)

    together([lambda i=i: asks(i) for i in range(count)])


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


def attack_22_many_windows(at: Victim) -> None:
    """Windows, uploads and asks as fast as one tenant can send them."""
    mallory = at.user("mallory")

    def busy(i: int) -> None:
        for k in range(4):
            window = mallory.window(f"Watch {i} {k}.", chunks=[long_text(i * 100 + k)])
            mallory.ask(window, "what stood there?", 8)

    together([lambda i=i: busy(i) for i in range(8)])


def trickle(at: Victim, begun: bytes, more: bytes, seconds: float = 2.0) -> None:
    """Sends ``begun`` and then ``more`` as fast as the server takes it, or as it lets us connect again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", at.port), timeout=5) as connection:
            connection.sendall(begun)
            while time.monotonic() < until:
                connection.sendall(more)


def attack_25_headers_without_end(at: Victim) -> None:
    """By somebody without a key: values, names, lines, trailers and chunk extensions that never end."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    begun = [(head + b"X: ", b"a" * 65536), (head, b"A: b\r\n" * 9000), (b"GET /", b"a" * 65536)]
    begun += [(chunked + b"1;x=", b"a" * 65536), (chunked + b"1\r\nx\r\n0\r\nX: ", b"a" * 65536)]
    together([lambda b=b, m=m: trickle(at, b, m) for b, m in begun])
    assert at.user("").call("/health", timeout=10)[0] == 200
    refused(*at.user("").call("/metrics", {}, "OPTIONS"))


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
