"""Drivers: they submit requests to vLLM and return the outputs, in any process or event loop that vLLM runs in.

A caller submits a request from any thread and reads its outputs from a queue; vLLM batches all requests in flight.
`StepDriver` steps a ``vllm.LLM``, in this process or in its own, in one thread; `LoopDriver` uses an ``AsyncLLM`` on an event
loop, its own thread's or a server's.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import math
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from ctxwin import tracing
from ctxwin.engines.forks import REMEDY
from ctxwin.errors import EngineFailed
from ctxwin_vllm import internals

T = TypeVar("T")
WATCH_S = 0.5  # how often to check that vLLM's engine process still runs
SETTLE_S = 2.0  # how long vLLM may take to notice its death after a call of the workers has failed
_serial = itertools.count()
_turn, _next = threading.Lock(), threading.Lock()
_running: weakref.WeakSet[Driver] = weakref.WeakSet()
_CLOSED = "the engine is closed; open a new one"
_INHERITED = f"vLLM runs in the process that this one was forked from; {REMEDY}"


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Lock for running vLLM in this process: one engine at a time, first come, first served.

    vLLM's forward context, its worker-side connector and torch's defaults while a model loads are globals of the process.
    """
    with _next:  # a thread that has just released it queues after those that wait
        _turn.acquire()
    try:
        yield
    finally:
        _turn.release()


class Ticket:
    """One request in flight, with vLLM's ``RequestOutput`` as they come, or the exception that ended it."""

    def __init__(self) -> None:
        self.name = f"ctxwin-{next(_serial)}"
        self.request = ""  # what vLLM calls it
        self.outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()


class Driver(ABC):
    """Requests to one vLLM engine. Thread-safe.

    Attributes:
        engine: its ``LLMEngine`` or ``AsyncLLM``; None once closed.
        config: its ``VllmConfig``.
        local: whether its model runs in this process.
        on_reset: called once vLLM's prefix cache is empty.
        between_steps: called before the next step in this process, once the last one's outputs are on their way.
    """

    engine: Any
    config: Any
    renderer: Any
    local: bool

    def __init__(self) -> None:
        self._under_way = {False: 0, True: 0}  # requests of ours, by whether they are in the background
        self._waited = -math.inf  # when a foreground request was last observed
        self._counting = threading.Lock()
        self._process = os.getpid()
        self.on_reset: Callable[[], None] = lambda: None
        self.between_steps: Callable[[], object] = lambda: None

    @property
    def inherited(self) -> bool:
        """True in a fork of the process that opened it: vLLM's threads are not there, its sockets and children are another's."""
        return os.getpid() != self._process

    @contextlib.contextmanager
    def counted(self, background: bool, requests: int = 1) -> Iterator[None]:
        """Count requests while they are under way."""
        with self._counting:
            self._under_way[background] += requests
        try:
            yield
        finally:
            with self._counting:
                self._under_way[background] -= requests
                self._waited = self._waited if background else time.monotonic()

    @property
    def busy(self) -> bool:
        """True if vLLM has a foreground request, of ours or a plain one."""
        with self._counting:
            busy = self._under_way[False] > 0 or self._unfinished() > sum(self._under_way.values())
            self._waited = time.monotonic() if busy else self._waited
            return busy

    @property
    def idle_s(self) -> float:
        """Seconds since a foreground request of vLLM was last observed."""
        return 0.0 if self.busy else time.monotonic() - self._waited

    def _unfinished(self) -> int:
        """Return the number of requests under way in vLLM where plain ones may be among them, else 0."""
        return 0

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context within which submitted requests begin in one step, where the driver steps vLLM itself."""
        return contextlib.nullcontext()

    @abstractmethod
    def submit(self, prompt: dict[str, Any], parameters: Any, priority: int, lora: Any = None) -> Ticket:
        """Submit a rendered prompt, for the model with ``lora`` (a ``LoRARequest``).

        Raises EngineFailed where vLLM has ended.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request; returns once vLLM has aborted it."""

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker's extension between two steps; arguments are strings and numbers only."""
        try:
            return self._rpc(method, args)
        except Exception as error:
            # Where a worker is killed, vLLM first fails calls under way as "cancelled", and notices its death only then.
            until = time.monotonic() + SETTLE_S
            while self.dead is None and time.monotonic() < until:
                time.sleep(0.02)
            raise error if self.dead is None else _ended(self.dead) from None

    @abstractmethod
    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]: ...

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's prefix cache; return False, and do nothing, while requests hold blocks of it."""
        if emptied := self._reset_prefix_cache():
            self.on_reset()
        return emptied

    @abstractmethod
    def _reset_prefix_cache(self) -> bool: ...

    @property
    @abstractmethod
    def dead(self) -> BaseException | None:
        """Why vLLM has ended or cannot be reached; None while it runs."""

    @abstractmethod
    def close(self) -> None:
        """End what the driver started; requests in flight get EngineFailed. Idempotent; does nothing where it is inherited."""


class StepDriver(Driver):
    """Drives a ``vllm.LLM`` with one thread, which alone touches it; engines in this process step in turn.

    A multi-process LLM returns nothing between two outputs, so a request that arrives while only long prefills run waits for
    the next token; `LoopDriver` has no such wait. ``llm`` was started with the connector, ``stop`` shuts it down.
    """

    def __init__(self, llm: Any, stop: Callable[[Any], None]) -> None:
        super().__init__()
        self.llm = llm
        self.engine = llm.llm_engine
        self.config = self.engine.vllm_config
        self.renderer = self.engine.renderer
        self.local = internals.in_process(self.engine)
        self._stop = stop
        self._tasks: deque[Callable[[], None]] = deque()
        self._tickets: dict[str, Ticket] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._dead: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctxwin-vllm", daemon=True)
        self._thread.start()
        if not self.local:
            threading.Thread(target=self._watch, name="ctxwin-vllm-watch", daemon=True).start()
        _running.add(self)

    def together(self) -> contextlib.AbstractContextManager[Any]:
        return self._wake

    def submit(self, prompt: dict[str, Any], parameters: Any, priority: int, lora: Any = None) -> Ticket:
        ticket = Ticket()

        def add() -> None:
            try:
                options = {"lora_request": lora, "priority": priority}
                request = self.engine.add_request(ticket.name, prompt, parameters, **options)
            except Exception as error:
                ticket.outputs.put(_ours(error))
            else:
                ticket.request = request
                self._tickets |= {request: ticket, ticket.name: ticket}

        self._post(add)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        def abort() -> None:
            if self._forget(ticket):
                self.engine.abort_request([ticket.request], internal=True)

        with contextlib.suppress(EngineFailed):
            self.call(abort)

    def call(self, task: Callable[[], T]) -> T:
        """Run ``task`` on vLLM's thread, between two steps. Raises EngineFailed where vLLM has ended."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(_ours(error))

        self._post(run)
        return future.result()

    def step(self) -> None:
        """Have vLLM take a step for its connector, where no request is in flight; else return between two steps."""
        self.call(lambda: None if self._tickets else self.engine.step())

    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return list(self.call(lambda: self.llm.collective_rpc(method, args=args)))

    def _reset_prefix_cache(self) -> bool:
        return bool(self.call(self.engine.reset_prefix_cache))

    @property
    def dead(self) -> BaseException | None:
        return EngineFailed(_INHERITED) if self.inherited else self._dead

    def close(self) -> None:
        if self.inherited:
            return
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._end(EngineFailed(_CLOSED))
        llm, self.llm, self.engine = self.llm, None, None
        self._stop(llm)

    def _post(self, task: Callable[[], None]) -> None:
        if self.inherited:  # another thread may have held the lock when the process was forked
            raise EngineFailed(_INHERITED)
        with self._wake:
            if self._closing:
                raise EngineFailed(_CLOSED)
            if self._dead is not None:
                raise _ended(self._dead) from self._dead
            self._tasks.append(task)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                for output in self._step():
                    ticket = self._tickets.get(output.request_id)
                    if ticket is None:
                        continue
                    if output.finished:
                        self._forget(ticket)
                    ticket.outputs.put(output)
                self.between_steps()
        except Exception as error:
            self._end(error)

    def _wait_for_work(self) -> bool:
        """Return once there is any; False where the driver closes."""
        with self._wake:
            while not (self._tasks or self._tickets or self._closing or internals.steps_ahead(self.engine)):
                self._wake.wait()
            return not self._closing

    def _step(self) -> Sequence[Any]:
        """Run the tasks, then a step if there are requests; return its outputs."""
        with in_turn() if self.local else contextlib.nullcontext():
            # Steps that vLLM ran ahead of the last answer's end keep its blocks.
            while not self._tickets and internals.steps_ahead(self.engine):
                self.engine.step()
            while (task := self._next_task()) is not None:  # one by one: a fault leaves the others to `_end`
                task()
            self.between_steps()  # of requests that a task has aborted
            if not self._tickets:
                return ()
            with _no_compilation(self.config):
                outputs: Sequence[Any] = self.engine.step()
                return outputs

    def _next_task(self) -> Callable[[], None] | None:
        with self._wake:
            return self._tasks.popleft() if self._tasks else None

    def _watch(self) -> None:
        """Wake vLLM's thread where its engine process was killed."""
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self.engine
        while not internals.core_died(engine):
            if self._ended.wait(WATCH_S):
                return
        error = EngineDeadError()
        self._end(error)
        internals.wake_waiting(engine, error)

    def _forget(self, ticket: Ticket) -> bool:
        """Remove a request; return True if it was still in flight."""
        self._tickets.pop(ticket.request, None)
        return self._tickets.pop(ticket.name, None) is not None

    def _end(self, error: BaseException) -> None:
        """Stop stepping, and give all waiting callers an error."""
        with self._wake:
            if not self._closing:
                self._dead = error
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:  # a request that is added now gets its answer below
            with contextlib.suppress(Exception):
                task()
        self.between_steps()
        waiting = {ticket.request: ticket for ticket in list(self._tickets.values())}
        self._tickets.clear()
        # A vLLM that another program runs goes on, and must not return outputs of our requests.
        if self._dead is None and waiting:
            with contextlib.suppress(Exception):
                self.engine.abort_request(list(waiting), internal=True)
        for ticket in waiting.values():
            ticket.outputs.put(_ended(error))


class LoopDriver(Driver):
    """Drives an ``AsyncLLM`` on the event loop that it belongs to. Never call it from that loop's own thread.

    Args:
        llm: started with the connector.
        loop: the loop it was started on; it must be running.
        stop: ends both; None where they belong to another program, a server for example.
    """

    local = False

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop, stop: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.engine = llm
        self.config = llm.vllm_config
        self.renderer = llm.renderer
        self._loop = loop
        self._stop = stop
        self._tasks: dict[str, Future[None]] = {}
        self._closed = False
        _running.add(self)

    def submit(self, prompt: dict[str, Any], parameters: Any, priority: int, lora: Any = None) -> Ticket:
        ticket, trace = Ticket(), tracing.headers()
        if self.dead is not None:
            raise _ended(self.dead)

        async def pump() -> None:
            try:
                options = {"priority": priority, "trace_headers": trace, "lora_request": lora}
                outputs = self.engine.generate(prompt, parameters, ticket.name, **options)
                async for output in outputs:
                    ticket.outputs.put(output)
            except asyncio.CancelledError:
                ticket.outputs.put(EngineFailed(_CLOSED))
                raise
            except Exception as error:
                dead = self.dead
                ticket.outputs.put(error if dead is None else _ended(dead))

        self._tasks[ticket.name] = task = self._start(pump())
        task.add_done_callback(lambda _: self._tasks.pop(ticket.name, None))  # it may have ended already
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        task = self._tasks.pop(ticket.name, None)
        if task is not None and not self._closed:
            task.cancel()  # reaches vLLM's generator, which aborts the request
            with contextlib.suppress(Exception):
                self._start(self.engine.abort(ticket.name)).result(timeout=10)

    def _unfinished(self) -> int:
        llm = self.engine
        return 0 if llm is None else internals.unfinished(llm)

    def _rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if self.dead is not None:
            raise _ended(self.dead)
        return list(self._wait(self._start(self.engine.collective_rpc(method, args=args))))

    def _reset_prefix_cache(self) -> bool:
        return bool(self._wait(self._start(self.engine.reset_prefix_cache())))

    @property
    def dead(self) -> BaseException | None:
        llm = self.engine
        if self.inherited:
            return EngineFailed(_INHERITED)
        if self._closed or llm is None:
            return EngineFailed(_CLOSED)
        if not self._loop.is_running():
            return EngineFailed("the event loop that vLLM was started on has ended; close this engine, open a new one")
        return llm.dead_error if llm.errored else None

    def close(self) -> None:
        if self._closed or self.inherited:
            return
        for task in list(self._tasks.values()):
            task.cancel()
        self._closed = True
        stop, self._stop = self._stop, None
        self.engine = None
        if stop is not None:
            stop()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed or self.inherited or not self._loop.is_running():
            work.close()
            raise EngineFailed(_INHERITED if self.inherited else _CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, future: Future[T]) -> T:
        """Return the result of work on the loop; vLLM never answers calls that were under way when its process died."""
        while not wait([future], timeout=WATCH_S).done:
            if (dead := self.dead) is not None:
                future.cancel()
                raise _ended(dead)
        try:
            return future.result()
        except Exception as error:
            raise _ours(error) from None


def _ours(error: BaseException) -> BaseException:
    """Return EngineFailed for vLLM's error about the end of its process; any other error as it is."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return _ended(error) if isinstance(error, EngineDeadError) else error


def _ended(error: BaseException) -> EngineFailed:
    """Return the error for vLLM's end; vLLM's own message points to a stack trace that does not exist."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineFailed):
        return error
    cause = "it was killed, or failed by itself" if isinstance(error, EngineDeadError) else str(error) or repr(error)
    return EngineFailed(f"vLLM's engine process has ended ({cause}); close this engine and open a new one")


def _no_compilation(config: Any) -> contextlib.AbstractContextManager[Any]:
    """Run vLLM's few ``torch.compile``d sampling functions uncompiled on a CPU, where compiling them takes 17 s."""
    eager = config.device_config.device_type == "cpu" and config.model_config.enforce_eager
    return torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()


@atexit.register
def _close_all() -> None:
    """Close all drivers: a thread that steps vLLM while the interpreter shuts down would crash it."""
    for driver in list(_running):
        with contextlib.suppress(Exception):
            driver.close()
