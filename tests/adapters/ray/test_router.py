"""The router inside a running Ray: replicas without an engine, of which one is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed; run pip install 'ctxwin[ray]'")

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig

from ctxwin_ray.hints import Hint, Request, window_prefix

pytestmark = pytest.mark.slow


@pytest.fixture
def ask() -> Iterator[Any]:
    class Echo:
        async def answer(self, request: Any) -> tuple[str, int]:
            return serve.get_replica_context().replica_id.unique_id, os.getpid()

    ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        routing = RequestRouterConfig(request_router_class="ctxwin_ray.router.WindowRouter")
        options = {"num_replicas": 3, "ray_actor_options": {"num_cpus": 0.1}, "request_router_config": routing}
        echo = serve.deployment(Echo, name="replica").options(**options)
        handle = serve.run(echo.bind(), name="echo", route_prefix=None).options(method_name="answer")
        yield lambda hint: handle.remote(Request(hint, "GET", "/", b"", (), b"")).result(timeout_s=60)
    finally:
        serve.shutdown()
        ray.shutdown()


def test_windows_find_who_opened_them_and_only_those_of_a_killed_replica_move(ask: Any) -> None:
    names = {ask(Hint())[0] for _ in range(60)}
    assert len(names) == 3
    windows = {f"{window_prefix(name)}{i:012x}": name for name in names for i in range(10)}
    places = {window: ask(Hint(window=window)) for window in windows}
    assert {window: name for window, (name, _) in places.items()} == windows
    sessions = [Hint(session=f"session:{i}") for i in range(30)]
    assert [ask(hint) for hint in sessions] == [ask(hint) for hint in reversed(sessions)][::-1]
    victim, process = next(iter(places.values()))
    os.kill(process, signal.SIGKILL)
    until = time.monotonic() + 60
    while not {victim, ""}.isdisjoint((now := {window: _answer(ask, window) for window in windows}).values()):
        assert time.monotonic() < until
    assert all(now[window] == name for window, name in windows.items() if name != victim)


def _answer(ask: Any, window: str) -> str:
    """The replica that answers; "" where it has just ended."""
    try:
        return str(ask(Hint(window=window))[0])
    except RayError:
        return ""
