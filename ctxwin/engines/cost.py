"""Cost of an ask on one engine, in milliseconds, fitted to the times of real calls.

Every engine carries one `CostModel`. It starts from rough priors, follows each call that ran alone, and prices what a
window is about to do: forwards by tokens and context, loads by tier of the store and size, what a request takes whatever is
in it, and the library's own work. A fit keeps the newest calls of each size, so its memory is bounded and a long run of equal
asks does not drive out what others taught it. It minimises relative absolute errors, so that a call that had to wait for the
machine counts no more than any other.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import mul
from statistics import median

import numpy as np

_KEPT, _SIZES, _NOTED = 6, 40, 4096
_ALL_UNTIL, _EVERY, _ROUNDS, _TIERS = 32, 8, 10, 8
_PAUSE_S, _SAME = 0.1, 0.03
_FORGOTTEN = 256  # calls


class Fit:
    """A running fit of milliseconds to amounts: ``ms ~ amounts . rates``, no rate negative.

    Args:
        prior: rates to begin with. Their ratios hold until calls tell them apart, their scale until the first call.

    The six newest calls of each of forty sizes are kept. Weighted least squares with weights by the last residuals finds the
    least sum of relative absolute errors; a weak pull to the prior decides what the calls leave open. Cost of `refit`:
    below a millisecond, due after each of the first 32 calls and every eighth later; rates change at no other time, and then
    where they price a kept call otherwise by 3 %: with each change all that is placed is priced anew. Calls with an amount that
    the last 256 calls had nothing of are dropped, so that the prior prices it.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.rates = tuple(float(rate) for rate in prior)
        self.calls = 0
        self._prior = np.array(self.rates)
        self._sizes: OrderedDict[tuple[int, ...], deque[tuple[tuple[float, ...], float]]] = OrderedDict()
        self._newest = [0] * len(self.rates)  # the last call with some of each amount

    def __call__(self, *amounts: float) -> float:
        """Milliseconds for these amounts."""
        ms: float = sum(map(mul, amounts, self.rates))
        return ms

    def observe(self, amounts: Sequence[float], ms: float) -> bool:
        """Take in a call that took ``ms``; return True if `refit` is due."""
        if not ms > 0:
            return False
        size = tuple(int(amount).bit_length() for amount in amounts)
        self._sizes.setdefault(size, deque(maxlen=_KEPT)).append((tuple(amounts), ms))
        self._sizes.move_to_end(size)
        if len(self._sizes) > _SIZES:
            self._sizes.popitem(last=False)
        self.calls += 1
        self._newest = [self.calls if amount else call for amount, call in zip(amounts, self._newest, strict=True)]
        return self.calls <= _ALL_UNTIL or self.calls % _EVERY == 0

    def refit(self) -> None:
        """Fit the rates to the calls."""
        old = [i for i, call in enumerate(self._newest) if call and self.calls - call >= _FORGOTTEN]
        for size in [size for size in self._sizes if any(size[i] for i in old)]:
            del self._sizes[size]
        for i in old:
            self._newest[i] = 0
        observations = [call for calls in self._sizes.values() for call in calls]
        took = np.array([ms for _, ms in observations])
        # In units of the prior, and of what each call took: rates near one, residuals that are shares.
        shares = np.array([amounts for amounts, _ in observations]) * self._prior / took[:, None]
        scale = 1 / max(median(shares.sum(1)), 1e-9)
        pull = 0.002
        rates, weights = np.full(len(self._prior), scale), np.ones(len(observations))
        for _ in range(_ROUNDS):
            weighted = shares * weights[:, None]
            square = shares.T @ weighted + np.eye(len(rates)) * pull / scale**2
            rates = _not_negative(square, weighted.sum(0) + pull / scale)
            weights = 1 / np.maximum(np.abs(1 - shares @ rates), 0.02)
        before, now = shares @ (self.rates / self._prior), shares @ rates
        if (np.abs(now - before) > _SAME * before).any():
            self.rates = tuple((rates * self._prior).tolist())


def _not_negative(square: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The least squares solution of the normal equations ``square x = target``, with negative entries held at 0."""
    free = np.ones(len(target), bool)
    solution = np.zeros(len(target))
    while free.any():
        solution[:] = 0
        solution[free] = np.linalg.solve(square[np.ix_(free, free)], target[free])
        if solution.min() >= 0:
            break
        free &= solution > 0
    return solution


@dataclass
class Workload:
    """Amount of work in engine calls.

    Attributes:
        requests: requests to the engine.
        computed: tokens that run a forward; ``attended``: pairs of one of them and a token that it attends to.
        loaded: tokens whose KV is brought in, in so many ``spans``; ``patched``: those of them that a patch is added to.
    """

    requests: int = 0
    computed: int = 0
    attended: float = 0.0
    loaded: int = 0
    spans: int = 0
    patched: int = 0

    def compute(self, tokens: int, offset: int) -> None:
        """Add a forward over ``tokens`` tokens behind ``offset`` others."""
        self.computed += tokens
        self.attended += attended(tokens, offset)

    def load(self, tokens: int, patched: bool) -> None:
        """Add a span that is brought in."""
        self.loaded += tokens
        self.spans += 1
        self.patched += tokens * patched

    @property
    def amounts(self) -> tuple[float, ...]:
        """Amounts of work that the time is fitted to."""
        return self.requests, self.computed, self.attended, self.loaded, self.spans, self.patched


def attended(tokens: int, offset: int) -> float:
    """Pairs of a computed token and one it attends to, for ``tokens`` behind ``offset`` others."""
    return tokens * (offset + (tokens + 1) / 2)


@dataclass
class CostModel:
    """Prices of one engine, in milliseconds of ``clock``. Thread-safe.

    Attributes:
        clock: seconds; the wall's by default. The processor time of the process prices the work without the waiting.
        engine: of `Workload.amounts`, up to the first token.
        library: of choosing lanes and laying out, by 1 and the placed chunks.
        noted: fits with amounts and what they took, which change prices at the next `settle`.
        tiers: of fetching one span or patch by where it lies, by 1 and its tokens.
    """

    clock: Callable[[], float] = time.perf_counter
    engine: Fit = field(default_factory=lambda: Fit((4.0, 0.05, 2e-6, 0.002, 0.2, 0.004)))
    library: Fit = field(default_factory=lambda: Fit((0.5, 0.05)))
    tiers: dict[str, Fit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock, self._settling = threading.RLock(), threading.Lock()
        self.noted: deque[tuple[Fit, Sequence[float], float]] = deque(maxlen=_NOTED)
        self._running = 0
        self._crowds = 0
        self._waits = False  # whether `settle_later` has a thread wait
        self._reads: dict[
            str, tuple[int, int]
        ] = {}  # by tier: its reads, and the engine's calls when there was a new one

    def forward_ms(self, tokens: int, offset: int) -> float:
        """A forward over ``tokens`` tokens behind ``offset`` others, in a request that runs anyway."""
        return self.engine(0, tokens, attended(tokens, offset), 0, 0, 0)

    @property
    def load_rates(self) -> Sequence[object]:
        """What the prices of loads follow from: while it is the same, so are they."""
        return self.engine.rates, [(name, fit.rates) for name, fit in list(self.tiers.items())]

    @property
    def request_ms(self) -> float:
        """One more request."""
        return self.engine.rates[0]

    def load_ms(self, tokens: int, patched: bool) -> float:
        """Bringing a span that was fetched to its place, with a patch or without.

        A patch takes no more than a forward over its tokens, which is many more products, whatever was learned: asks of a stream
        all load as much, so that all that disturbs them counts as the price of patches.
        """
        added = min(self.engine(0, 0, 0, 0, 0, tokens), self.forward_ms(tokens, 0)) if patched else 0.0
        return self.engine(0, 0, 0, tokens, 1, 0) + added

    def fetch_ms(self, tier: str, tokens: int) -> float:
        """Reading a span or patch of ``tokens`` tokens from a tier of the store."""
        return self._tier(tier)(1, tokens)

    def _tier(self, name: str) -> Fit:
        if (known := self.tiers.get(name)) is not None:
            return known
        with self._lock:
            if name not in self.tiers and len(self.tiers) >= _TIERS:
                name = next(iter(self.tiers))
            return self.tiers.setdefault(name, Fit(_PRIORS.get(name, _PRIOR)))

    def fetched(self, tier: str, tokens: int, ms: float, reads: int = 1) -> None:
        """Note one or more reads."""
        self.learn(self._tier(tier), (reads, tokens), ms)

    def settle(self) -> None:
        """Take in all that was noted; called when no answer waits."""
        with self._settling:
            due: dict[int, Fit] = {}
            while self.noted:
                fit, amounts, ms = self.noted.popleft()
                if fit.observe(amounts, ms):
                    due[id(fit)] = fit
            for fit in due.values():
                fit.refit()
            if id(self.engine) in due:
                self._reset_unread_tiers()

    def _reset_unread_tiers(self) -> None:
        for name, tier in list(self.tiers.items()):
            reads, calls = self._reads.get(name, (0, 0))
            if tier.calls != reads:
                self._reads[name] = tier.calls, self.engine.calls
            elif reads and self.engine.calls - calls >= _FORGOTTEN:
                self._reads[name] = 0, 0
                self.tiers[name] = Fit(_PRIORS.get(name, _PRIOR))

    def settle_later(self) -> None:
        """Have `settle` called by a thread, once for all asks of `_PAUSE_S`: the next one mostly follows at once, and would share
        the interpreter with the fits."""
        with self._lock:
            waits, self._waits = self._waits, True
        if not waits:
            try:
                _thread(os.getpid()).submit(self._settle_behind_asks)
            except RuntimeError:  # the interpreter ends, and takes no more work
                self.settle()

    def _settle_behind_asks(self) -> None:
        time.sleep(_PAUSE_S)
        with self._lock:
            self._waits = False
        self.settle()

    @contextmanager
    def timed(self) -> Iterator[Stopwatch]:
        """Time a call of the engine. Its time teaches nothing where another call ran meanwhile: they wait for each other."""
        with self._lock:
            self._running += 1
            crowds = self._crowds = self._crowds + (self._running > 1)
            alone = self._running == 1
        watch = Stopwatch(self.clock)
        try:
            yield watch
        finally:
            watch.stop()
            with self._lock:
                self._running -= 1
                watch.alone = alone and crowds == self._crowds

    def learn(self, fit: Fit, amounts: Sequence[float], ms: float) -> None:
        """Note what something took."""
        self.noted.append((fit, amounts, ms))


@cache
def _thread(process: int) -> ThreadPoolExecutor:
    """Return the thread of this process that fits prices; a forked process has none of its parent's."""
    return ThreadPoolExecutor(1, thread_name_prefix="ctxwin-prices")


_PRIOR = (0.5, 0.01)  # of a tier; these are better known:
_PRIORS = {"at hand": (0.02, 0.0001), "MemoryStore": (0.1, 0.002)}


class Stopwatch:
    """Milliseconds since it was made, with one lap: the first token of an answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.first: float | None = None
        self.ms = 0.0
        self.alone = True

    def lap(self) -> None:
        """Marks the first token; later calls change nothing."""
        if self.first is None:
            self.first = 1e3 * (self._clock() - self._began)

    def stop(self) -> None:
        """End it."""
        self.ms = 1e3 * (self._clock() - self._began)
