"""Prefill while the engine idles: the prompts that chats are expected to send next are computed ahead of them.

A predicted request (`ctxwin_chats.prediction`) goes the way of its client's own, so that it is checked, rendered and kept apart
from other tenants as that is. Only the engine's client treats it otherwise: it runs the prompt a slice at a time, and begins none
while another request is under way. What it leaves is vLLM's own prefix cache, where the next request finds it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ctxwin.window.idle_worker import TimeAllowance
from ctxwin_chats.prediction import Prediction

QUIET_S, POLL_S = 0.05, 0.02
"""Seconds that the engine must have been idle before a prompt is begun, and between two looks at it."""
MOST_BYTES = 256 << 20
"""Bytes of all requests that wait to be sent."""
SLICE_S, LONG_SLICE_S = 0.05, 0.5
"""Seconds for which a request may find the engine taken by a slice of a predicted prompt, and where requests are rare."""
_RARE = 0.2
"""Share of the time since others were served last that a slice may take."""
_LONG_SLICE = 256
"""Tokens from which on a longer slice is hardly faster by token."""
_log = logging.getLogger("ctxwin.serve")


@dataclass(eq=False)
class Ahead:
    """One predicted request on its way to the engine.

    Attributes:
        slice_s: seconds that a slice may take where shorter ones are slower by token.
        result: ``complete``; ``interrupted``, where it gave way to another request and can be sent again; else ``refused``.
    """

    prediction: Prediction
    slice_s: float = SLICE_S
    result: str = "refused"

    def slice_tokens(self, pace: float) -> int:
        """Return how many tokens to compute next on an engine that computes ``pace`` tokens a second."""
        return int(max(pace * SLICE_S, min(_LONG_SLICE, pace * self.slice_s)))


class ChatPrefill:
    """Computes predicted prompts, one at a time, while the engine idles.

    Args:
        busy: returns whether other requests are under way.
        count: called with the tenant and the result of each prompt that was sent.
    """

    def __init__(self, busy: Callable[[], bool], count: Callable[[str, str], None]) -> None:
        self._busy, self._count = busy, count
        self._queue: OrderedDict[Prediction, tuple[str, Callable[[Ahead], Awaitable[object]]]] = OrderedDict()
        self._allowances: dict[str, TimeAllowance] = {}
        self._queued = 0
        self._others = time.monotonic()  # when a request of another conversation was last under way
        self._task: asyncio.Task[None] | None = None

    def submit(self, tenant: str, prediction: Prediction, send: Callable[[Ahead], Awaitable[object]]) -> None:
        """Queue a prediction; ``send`` sends its request through the server.

        The oldest are dropped from a full queue; one that is larger than the queue is not taken.
        """
        if prediction.size > MOST_BYTES:
            prediction.body = {}
            return
        self._queue[prediction] = tenant, send
        self._queued += prediction.size
        while self._queued > MOST_BYTES:
            self._take()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def refund(self, tenant: str, prediction: Prediction) -> None:
        """Give a tenant back the time of a prediction that was right: its request would have taken it."""
        self._allowance(tenant).add(prediction.seconds)

    async def stop(self) -> None:
        """Drop all predictions, and wait for the end of the slice under way."""
        while self._queue:
            self._take()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        idle_since = time.monotonic()
        while self._queue:
            prediction, (tenant, send) = next(iter(self._queue.items()))
            if prediction.cancelled:
                self._take()
                continue
            if self._busy():
                self._others = idle_since = time.monotonic()
            spent = self._allowance(tenant).add(0) <= 0
            if spent or time.monotonic() - idle_since < QUIET_S:
                if spent:  # the oldest first: its conversation goes on first
                    self._queue.move_to_end(prediction)
                await asyncio.sleep(POLL_S)
                continue
            ahead = Ahead(prediction, min(LONG_SLICE_S, _RARE * (time.monotonic() - self._others)))
            seconds = prediction.seconds
            try:
                await send(ahead)
            except Exception as error:
                _log.warning("a chat's next prompt was not computed ahead (%s)", error)
            self._allowance(tenant).add(seconds - prediction.seconds)
            self._count(tenant, ahead.result)
            if ahead.result == "interrupted":
                idle_since = time.monotonic()
                self._others = self._others if prediction.cancelled else idle_since
            elif prediction in self._queue:
                self._take(prediction)

    def _take(self, prediction: Prediction | None = None) -> None:
        """Drop a prediction, or the oldest, from the queue, and release its request."""
        prediction = prediction or next(iter(self._queue))
        del self._queue[prediction]
        self._queued -= prediction.size
        prediction.body = {}

    def _allowance(self, tenant: str) -> TimeAllowance:
        return self._allowances.setdefault(tenant, TimeAllowance())
