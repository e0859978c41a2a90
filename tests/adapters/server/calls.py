"""Bare requests to a server under test, and what several test files need with them."""

from __future__ import annotations

import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from PIL import Image


class Reachable(Protocol):
    """A server that answers at an address."""

    url: str


def call(server: Reachable, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """A bare request; returns the status and the parsed body."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if data is not None and "content-type" not in named:
        named["content-type"] = "application/json"
    request = urllib.request.Request(server.url + path, data, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def open_window(server: Reachable, **body: object) -> str:
    """Return the id of a new window."""
    return str(call(server, "/v1/windows", {"system_prompt": "h", **body})[1]["id"])


def read_metrics(server: Reachable) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(2000):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within 20 s")


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
