"""The order of loads and forwards on a device: loads have a stream of their own, and a forward waits for them layer by layer.

A load begins behind what the device was told before the step's forward: forwards and reads that still use its blocks. Nobody
waits for a load in the background: its request goes on once it is written. On a processor all is done as it is queued.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


class LoadStream:
    """The ``stream`` of one device's loads, which begin behind the event ``before_forward``; ``copies``: that to the host."""

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self._device, self.stream, self.copies = device, self._api.Stream(device), self._api.Stream(device)
        self.before_forward, self._background = None, False
        self._written: dict[str, Any] = {}  # the event behind the loads of each layer, of the step's loads
        self._missed: set[str] = set()  # those of these layers that nothing has waited for

    def begin(self, *, background: bool) -> Any:
        """Begin a load; return the context in which all of it is computed."""
        self._background = background
        self.stream.wait_event(self.before_forward or self.event())
        return self._api.stream(self.stream)

    def queue(self, write: Callable[[], object], layers: Sequence[str]) -> None:
        """Queue what writes these layers, within the context of `begin`."""
        write()
        if not self._background:
            self._written |= dict.fromkeys(layers, self.event(loads=True))
            self._missed.update(layers)

    def wait(self, layer: str) -> None:
        """Let the current stream wait for the loads of a layer."""
        if layer in self._written:
            self._api.current_stream(self._device).wait_event(self._written[layer])
            self._missed.discard(layer)

    def finish(self) -> bool:
        """End the step: wait for all of its layers; return False if nothing had waited for one of them."""
        awaited = not self._missed
        for layer in self._written:
            self.wait(layer)
        self._written, self.before_forward = {}, None
        return awaited

    @contextmanager
    def reading(self, event: Any) -> Iterator[None]:
        """Let another thread use what was read before ``event``, while forwards go on.

        Its device is this one: a new thread's is the first, where to leave the stream would else open a context of its own.
        """
        self.copies.wait_event(event)
        with (
            torch.cuda.device(self._device) if self._api is torch.cuda else nullcontext(),
            self._api.stream(self.copies),
        ):
            yield

    def event(self, *, loads: bool = False) -> Any:
        """Return an event behind what the current stream, or that of ``loads``, was told so far."""
        event = self._api.Event()
        event.record(self.stream if loads else self._api.current_stream(self._device))
        return event
