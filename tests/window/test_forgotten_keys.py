"""After everything is forgotten, the store lists what it lists for windows that never held anything.

Random programs over every kind of content run on the tiny model; then each chunk is forgotten. What is left may only be what
does not depend on a chunk: system prompts and shared bases.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window, open_engine, open_store
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.encoder import Encoder
from ctxwin.errors import CtxwinError
from ctxwin.store.spans import SpanRepository
from store.redis_server import Server

CONTENTS = ("text", "picture", "captioned", "video", "frames", "message", "shown", "tokens", "same")
FIDELITIES = {
    "exact": Fidelity("exact"),
    "blind": Fidelity("blind"),
    "keep": Fidelity("patched", rank=2),
    "removal": Fidelity("patched", rank=2, survivors="removal"),
    "refresh": Fidelity("patched", rank=4, survivors="refresh"),
    "orbit": Fidelity("patched", rank=2, orbit=True),
    "partial": Fidelity("patched", rank=2, recompute=2),
    "edited": Fidelity("patched", rank=2, edited_tokens=64),
    "merged": Fidelity("patched", rank=2, merge=0.5),
    "joint": Fidelity("patched", rank=2, survivors="removal", advanced={"layout": "joint"}),
    "shared": Fidelity("patched", bytes_share=0.1, advanced={"layout": "shared"}),
}
STORES = ("memory:", "disk:{}", "tiered:memory:,disk:{}")
OPS = (
    "append", "append", "insert", "ask", "ask", "remember", "evict", "slide", "recall", "repair", "reorder", "toggle", "refresh",
    "compress", "merge", "orbit", "fork", "prefill", "undo", "disposable", "other prompt",
)  # fmt: skip


def pixels(seed: int, frames: int = 1) -> Any:
    drawn = np.random.default_rng(seed).integers(0, 255, (frames, 28, 28, 3), dtype=np.uint8)
    return drawn[0] if frames == 1 else list(drawn)


def content(kind: str, seed: int) -> Chunk:
    if kind == "text":
        return Chunk.text(f"{seed} red blue circle " * (1 + seed % 3))
    if kind == "picture":
        return Chunk.image(pixels(seed))
    if kind == "captioned":  # the same pixels under a line of text
        return Chunk.image(pixels(seed), text=f"t={seed} s")
    if kind in ("video", "frames"):
        return Chunk.video(pixels(seed, 4), fps=2.0, as_frames=kind == "frames")
    if kind == "message":
        return Chunk.message("assistant" if seed % 2 else "user", [f"the number {seed}"])
    if kind == "shown":
        return Chunk.message("user", ["look", Chunk.image(pixels(seed))])
    if kind == "tokens":
        return Chunk.tokens([20 + seed, 21 + seed, 22])
    return Chunk.text("same words")


class Program:
    """One window, and what it leaves in a store."""

    def __init__(self, engine: Engine, fidelity: Fidelity) -> None:
        self.window = Window(engine, "watch", fidelity=fidelity)
        self.appended: list[Chunk] = []

    def run(self, op: str, kind: str, i: int) -> None:
        with suppress(CtxwinError, ValueError, IndexError, ZeroDivisionError):  # nothing placed, nothing evicted
            self._run(op, kind, i)

    def _run(self, op: str, kind: str, i: int) -> None:
        window = self.window
        ids, gone = window.ids, window.evicted
        if op == "append":
            self.appended.append(content(kind, i))
            window.append(self.appended[-1])
        elif op == "insert":
            self.appended.append(content(kind, i))
            window.insert(i % (len(ids) + 1), self.appended[-1])
        elif op in ("ask", "remember"):
            answer = window.ask("what color?", max_tokens=2, remember=op == "remember")
            self.appended += [window.chunk(answer.remembered)] if answer.remembered else []
        elif op == "evict":
            window.evict(ids[i % len(ids)])
        elif op == "slide":
            window.slide(1)
        elif op in ("recall", "repair"):
            window.recall(gone[i % len(gone)], repair=op == "repair")
        elif op == "reorder":
            at = i % len(ids)
            window.reorder([*ids[at:], *ids[:at]])
        elif op == "toggle":
            window.toggle(ids[i % len(ids)], conditioned=i % 2 == 0)
        elif op == "refresh":
            window.maintenance.refresh(1)
        elif op == "compress":
            window.maintenance.compress()
        elif op == "merge":
            window.maintenance.merge((*ids, *gone)[i % (len(ids) + len(gone))])
        elif op == "orbit":
            window.maintenance.prepare_orbit(ids[:-1], orders=2)
        elif op == "prefill":
            window.maintenance.prefill()
        elif op == "undo":
            window.undo()
        elif op == "disposable":
            window.disposable(ids[i % len(ids)], "what color?", 1)
        elif op in ("fork", "other prompt"):
            with window.fork("another prompt" if op == "other prompt" else None) as branch:
                branch.evict(branch.ids[0])
                branch.append(branch.chunk(branch.evicted[-1]))
                branch.ask("what now?", max_tokens=1)

    def forget_all(self) -> None:
        """What an undo took back is in no list of the window any more: it is placed once more to be forgotten."""
        state = self.window.snapshot()
        held = {p.chunk_id for p in (*state.placed, *state.evicted)}
        again = [self.window.append(chunk) for chunk in self.appended if chunk.id not in held]
        for placement in (*(p.id for p in (*state.placed, *state.evicted)), *again):
            self.window.evict(placement, forget=True)
        self.window.check()


def independent(keys: set[str], engine: Engine) -> set[str]:
    """Those of ``keys`` that no chunk has part in."""
    return {k for k in keys if k.startswith("basis/") or engine.repo.record_of(k).get("provenance") == "system_prompt"}


@pytest.fixture(scope="module")
def opened() -> Iterator[Engine]:
    with open_engine("tiny:hf", dtype="float32") as engine:
        yield engine


def on(engine: Any, store: str, tenant: str = "") -> Engine:
    """The engine over another store, as if it had been opened so."""
    view = object.__new__(type(engine))
    vars(view).update(vars(engine))
    view.store = open_store(store, tenant=tenant)
    view.repo = SpanRepository(view.store, engine.spec.identity, spec=engine.spec.kv)
    parts = engine._encode_media, engine.decoder.positions, engine.counters
    view.encoder = Encoder(engine.encoder.checkpoint, engine.spec.identity, view.repo, *parts)
    return view


def left_behind(engine: Engine, fidelity: Fidelity, program: list[tuple[str, str, int]]) -> set[str]:
    run = Program(engine, fidelity)
    for op, kind, i in program:
        run.run(op, kind, i)
    run.forget_all()
    keys = set(engine.store.list())
    run.window.close()
    return keys - independent(keys, engine)


STEP = st.tuples(st.sampled_from(OPS), st.sampled_from(CONTENTS), st.integers(0, 5))


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_forgetting_everything_leaves_no_key(
    opened: Engine, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(STORES))
    fidelity = FIDELITIES[data.draw(st.sampled_from(sorted(FIDELITIES)))]
    program = data.draw(st.lists(STEP, min_size=1, max_size=12))
    engine = on(opened, name.format(tmp_path_factory.mktemp("store")))
    with closing(engine.store):
        assert not left_behind(engine, fidelity, program)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.mark.redis
@pytest.mark.parametrize("place", ["{}", "tiered:memory:,{}"])
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_forgetting_everything_leaves_no_key_in_redis(
    opened: Engine, redis: str, place: str, data: st.DataObject
) -> None:
    """Listed by another client, whatever this one remembers in front of it."""
    fidelity = FIDELITIES[data.draw(st.sampled_from(sorted(FIDELITIES)))]
    program = data.draw(st.lists(STEP, min_size=1, max_size=12))
    tenant = uuid.uuid4().hex
    engine = on(opened, place.format(redis), tenant)
    with closing(engine.store), closing(open_store(redis, tenant=tenant)) as other:
        run = Program(engine, fidelity)
        for op, kind, i in program:
            run.run(op, kind, i)
        run.forget_all()
        keys = set(other.list())
        run.window.close()
        assert keys >= set(engine.store.list()) and not keys - independent(keys, engine)


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("lost", ["nothing", "embeddings", "pixels and embeddings"])
def test_each_kind_of_content(opened: Engine, kind: str, lost: str) -> None:
    """Also where the store has lost a part of it, so that its media cannot be encoded again."""
    engine = on(opened, "memory:")
    with Window(engine, "watch") as window:
        placed = window.append(content(kind, 3))
        window.ask("what color?", max_tokens=1)
        window.evict(placed)
        for key in list(engine.store.list()):
            if (lost != "nothing" and key.startswith("embed/")) or ("pixels" in lost and key.startswith("source/")):
                engine.store.delete(key)
        encodes = engine.counters.vision_encodes
        window.evict(placed, forget=True)
        assert engine.counters.vision_encodes == encodes, "nothing is seen again to be forgotten"
        keys = set(engine.store.list())
        assert not keys - independent(keys, engine)
