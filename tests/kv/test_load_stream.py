"""Streams and events of a GPU, played: what waits for what."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxwin.kv.kernels import load_stream
from ctxwin.kv.kernels.load_stream import LoadStream


class Played:
    """``torch.cuda`` with three streams that list what they are told; an event is the last thing told before it."""

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {"forward": [], "load": [], "copy": []}
        self.current, self.made, self.device_now = "forward", iter(["load", "copy"]), 0
        played = self

        class Event:
            def record(self, stream: Any) -> None:
                self.behind = (played.told[stream.name] or ["nothing"])[-1]

            def query(self) -> bool:
                return self.behind == "written"

        self.Event = Event

    def Stream(self, device: Any) -> Any:  # noqa: N802  # torch's name
        return self._stream(next(self.made))

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_event=lambda event: self.told[name].append(f"wait for {event.behind}"))

    def current_stream(self, device: Any) -> Any:
        return self._stream(self.current)

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.current = self.current, stream.name
        self.left = self.device_now  # the device that leaving it returns to, which torch opens if need be
        yield
        self.current = before

    @contextmanager
    def device(self, device: Any) -> Any:
        before, self.device_now = self.device_now, device.index
        yield
        self.device_now = before

    def tell(self, work: str) -> Any:
        return lambda: self.told[self.current].append(work)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(load_stream, "torch", SimpleNamespace(cuda=played, cpu=None))
    return played


def test_a_load_begins_behind_what_used_its_blocks_and_each_layer_behind_its_own_write(gpu: Played) -> None:
    loads = LoadStream(torch.device("cuda", 0))
    gpu.tell("read back")()
    loads.before_forward = loads.event()
    gpu.tell("forward")()
    with loads.begin(background=False):
        loads.queue(gpu.tell("a"), ["a"])
        loads.queue(gpu.tell("b"), ["b"])
    assert gpu.told["load"] == ["wait for read back", "a", "b"], "not behind the step's own forward"
    loads.wait("other")
    loads.wait("a")
    assert gpu.told["forward"][2:] == ["wait for a"]
    assert not loads.finish() and gpu.told["forward"][3:] == ["wait for a", "wait for b"]
    assert loads.finish() and len(gpu.told["forward"]) == 5


def test_no_forward_waits_for_a_background_load(gpu: Played) -> None:
    loads = LoadStream(torch.device("cuda", 0))
    with loads.begin(background=True):
        loads.queue(gpu.tell("a"), ["a"])
    done = loads.event(loads=True)
    loads.wait("a")
    assert loads.finish() and gpu.told["forward"] == [] and not done.query()


def test_what_was_read_goes_to_the_host_beside_later_forwards(gpu: Played) -> None:
    gpu.made = iter(["load", "copy"] * 2)
    loads = LoadStream(torch.device("cuda", 0))
    gpu.tell("read back")()
    read = loads.event()
    gpu.tell("forward")()
    with loads.reading(read):
        gpu.tell("to the host")()
    assert gpu.left == 0
    with LoadStream(torch.device("cuda", 3)).reading(read):
        assert gpu.left == 3  # of a rank's thread, whose device is none of its own to begin with
    assert gpu.told["copy"] == ["wait for read back", "to the host", "wait for read back"] and gpu.told["forward"] == [
        "read back",
        "forward",
    ]


def test_on_a_processor_everything_is_done_as_it_is_queued() -> None:
    loads, written = LoadStream(torch.device("cpu")), []
    loads.before_forward = loads.event()
    with loads.begin(background=False):
        loads.queue(lambda: written.append("a"), ["a"])
    assert written == ["a"] and loads.event(loads=True).query()
    loads.event().synchronize()
    loads.event(loads=True).synchronize()
    loads.wait("a")
    assert loads.finish()
