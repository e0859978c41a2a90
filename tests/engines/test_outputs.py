"""Stage outputs: kept with the KV, handed on with the answer, the same with reuse and without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.engines.outputs import HIDDEN, OutputReferences, concat_outputs, load_output, rows_of
from ctxwin.errors import EngineFailed, OutputGone, StoreFull
from ctxwin.store import open_store
from engines import models
from engines.conformance import HEADER, QUERY, picture
from engines.hybrids import WRITERS

CHUNKS = [Chunk.image(picture(1), text="frame 1"), Chunk.text("the camera is blue now"), Chunk.image(picture(2, 56))]
Opener = Callable[[str], Engine]


def test_whatever_has_a_row_a_token_is_found() -> None:
    @dataclass
    class Made:
        last_hidden_state: torch.Tensor
        past_key_values: torch.Tensor
        audio: dict[str, torch.Tensor]
        one: float = 0.5

    audio = {"codes": torch.arange(10), "pooled": torch.ones(3)}
    found = rows_of(Made(torch.ones(1, 8, 4), torch.ones(1, 8, 2), audio), 8)
    assert {name: tuple(rows.shape) for name, rows in found.items()} == {HIDDEN: (8, 4), "audio.codes": (8,)}
    assert list(rows_of((torch.ones(8, 4), [torch.ones(8, 2)]), 8)) == [HIDDEN, "1"]
    assert rows_of(torch.ones(1, 4), 1)[HIDDEN].shape == (1, 4)
    with pytest.raises(EngineFailed, match="the same outputs"):
        concat_outputs([{"a": torch.ones(2)}, {"b": torch.ones(2)}])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.wide(lambda f: models.write_vision_model(f, "qwen3_vl"), tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def opened(request: pytest.FixtureRequest, folder: Path) -> Opener:
    return lambda store: open_engine(f"{request.param}:{folder}", dtype="float32", outputs=True, store=store)


def asked(
    engine: Engine, chunks: list[Chunk], fidelity: Fidelity | None = None
) -> tuple[Mapping[str, torch.Tensor], int]:
    """One chunk after the other, an answer behind each; the last one's outputs, and what it computed."""
    with Window(engine, HEADER, fidelity=fidelity or Fidelity("exact")) as window:
        for chunk in chunks:
            window.append(chunk)
            answer = window.ask(QUERY, max_tokens=4)
        assert answer.outputs is not None
        rows = window.tokens + engine.encode_query(QUERY).tokens + len(answer.token_ids) - 1
        assert {name: len(found) for name, found in answer.outputs.items()} == {HIDDEN: rows}
        return answer.outputs, answer.usage.computed_tokens


class TestBothEngines:
    """On each engine, started once for every store of its own: what is stored is all that is carried on."""

    @pytest.fixture(scope="class")
    @classmethod
    def first(cls, opened: Opener, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.Tensor]]:
        """A store that a process has left behind, and what it was given."""
        where = tmp_path_factory.mktemp("store")
        with opened(f"disk:{where}") as engine:
            outputs, computed = asked(engine, CHUNKS)
            assert computed <= engine.encode(CHUNKS[-1]).tokens + engine.encode_query(QUERY).tokens + 32
        yield where, outputs[HIDDEN]

    def test_they_are_those_of_a_forward_without_reuse(
        self, opened: Opener, first: tuple[Path, torch.Tensor], folder: Path
    ) -> None:
        with open_engine(f"hf:{folder}", dtype="float32", outputs=True) as engine, Window(engine, HEADER) as window:
            window.extend(CHUNKS)
            whole = window.ask(QUERY, max_tokens=4).outputs
        assert whole is not None
        torch.testing.assert_close(first[1], whole[HIDDEN], atol=2e-4, rtol=0)

    def test_a_store_brings_them_back_to_the_bit(self, opened: Opener, first: tuple[Path, torch.Tensor]) -> None:
        where, before = first
        with opened(f"disk:{where}") as engine:
            outputs, computed = asked(engine, CHUNKS)
            assert computed < engine.encode_query(QUERY).tokens + 32, "nothing but the query, and the rest of a block"
            assert torch.equal(outputs[HIDDEN], before)
            assert engine.counters.vision_encodes == 0
            with Window(engine, HEADER, fidelity=Fidelity("blind")) as window:
                window.extend(CHUNKS)
                assert window.ask(QUERY, max_tokens=1).outputs is None, "approximate KV has no outputs of its own"

    def test_a_corrupt_file_is_computed_to_the_same(self, opened: Opener, first: tuple[Path, torch.Tensor]) -> None:
        where, before = first
        files = sorted((path for path in where.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
        for path in files[:3]:
            blob = bytearray(path.read_bytes())
            blob[len(blob) // 2] ^= 0xFF
            path.write_bytes(bytes(blob))
        with opened(f"disk:{where}") as engine:
            outputs, _ = asked(engine, CHUNKS)
            torch.testing.assert_close(outputs[HIDDEN], before, atol=1e-5, rtol=0)

    def test_only_the_last_token_of_an_answer_at_its_limit_has_none(self, opened: Opener) -> None:
        with opened("memory:") as engine, Window(engine, HEADER) as window:
            window.append(CHUNKS[0])
            whole = window.ask(QUERY, max_tokens=4)
            ended = window.ask(QUERY, max_tokens=4, stop=[whole.token_ids[2]])
            for answer, lacking in ((whole, 1), (ended, 0)):
                assert answer.outputs is not None
                rows = len(answer.outputs[HIDDEN]) - answer.usage.prompt_tokens
                assert rows == len(answer.token_ids) - lacking


def test_a_killed_process_leaves_whole_records(folder: Path, tmp_path: Path) -> None:
    """Killed in the midst of its work; the next one is given what a process of its own is."""
    code = (
        "import os\nfrom engines.test_outputs import *\n"
        f"engine = open_engine('hf:{folder}', dtype='float32', outputs=True, store='disk:{tmp_path}')\n"
        "asked(engine, CHUNKS[:2])\nos.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300)
    assert ended.returncode == -9, ended.stderr.decode()[-2000:]
    with open_engine(f"hf:{folder}", dtype="float32", outputs=True) as alone:
        want, _ = asked(alone, CHUNKS)
    with open_engine(f"hf:{folder}", dtype="float32", outputs=True, store=f"disk:{tmp_path}") as engine:
        got, _ = asked(engine, CHUNKS)
        assert engine.counters.vision_encodes == 1, "the third chunk's alone"
    assert torch.equal(got[HIDDEN], want[HIDDEN])


def test_a_hybrid_hands_them_on_beside_its_states(tmp_path: Path) -> None:
    """Also from a store, and where a remembered exchange and a stop text end a request."""
    name, store = f"hf:{WRITERS['qwen3_5'](tmp_path / 'model')}", f"disk:{tmp_path / 'kv'}"
    with open_engine(name, dtype="float32", outputs=True, store=store) as engine:
        first, _ = asked(engine, CHUNKS)
        with Window(engine, HEADER) as window:
            window.extend(CHUNKS[:2])
            window.ask(QUERY, max_tokens=4, remember=True)
            exchanged = window.ask(QUERY, max_tokens=2).outputs
            placed = [window.chunk(i) for i in window.ids]
    with open_engine(name, dtype="float32", outputs=True, store=store) as engine:
        stored, computed = asked(engine, CHUNKS)
        assert computed == engine.encode_query(QUERY).tokens and torch.equal(stored[HIDDEN], first[HIDDEN])
    with open_engine(name, dtype="float32", outputs=True) as engine:
        for chunks, outputs, tokens in ((CHUNKS, first, 4), (placed, exchanged, 2)):
            with Window(engine, HEADER) as window:
                window.extend(chunks)
                whole = window.ask(QUERY, max_tokens=tokens).outputs
            assert whole is not None and outputs is not None
            torch.testing.assert_close(outputs[HIDDEN], whole[HIDDEN], atol=2e-4, rtol=0)


def test_an_engine_without_them_shares_no_spans(folder: Path) -> None:
    store = open_store("memory:")
    with open_engine(f"hf:{folder}", dtype="float32", store=store) as plain, Window(plain, HEADER) as window:
        window.extend(CHUNKS)
        assert window.ask(QUERY, max_tokens=1).outputs is None
    with open_engine(f"hf:{folder}", dtype="float32", store=store, outputs=True) as engine:
        assert engine.spec.identity != plain.spec.identity
        asked(engine, CHUNKS)


def test_a_remembered_exchange_has_them(folder: Path) -> None:
    with open_engine(f"hf:{folder}", dtype="float32", outputs=True) as engine, Window(engine, HEADER) as window:
        window.append(CHUNKS[0])
        window.ask(QUERY, max_tokens=4, remember=True)
        answer = window.ask(QUERY, max_tokens=2)
        assert answer.outputs is not None
        assert (
            len(answer.outputs[HIDDEN]) == window.tokens + engine.encode_query(QUERY).tokens + len(answer.token_ids) - 1
        )


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 4)), max_size=25), st.integers(300, 900))
def test_outputs_wait_as_in_a_list(steps: list[tuple[int, int, int]], max_bytes: int) -> None:
    """Against a plain list of what waits, oldest first."""
    now = 0.0
    references = OutputReferences(max_bytes, 5.0, clock=lambda: now)
    waiting: list[tuple[str, int, float, torch.Tensor]] = []
    known: set[str] = set()
    for rows, value, pause in steps:
        now += pause
        tensor = torch.full((rows, 8), float(value))
        waiting = [entry for entry in waiting if entry[2] > now]
        try:
            reference = references.put({HIDDEN: tensor}, "/windows/w")[HIDDEN]
        except StoreFull:
            assert rows * 32 + 100 > max_bytes
        else:
            key, size = reference["digest"], reference["bytes"]
            known.add(key)
            waiting = [*(entry for entry in waiting if entry[0] != key), (key, size, now + 5.0, tensor)]
            while sum(entry[1] for entry in waiting) > max_bytes:
                waiting.pop(0)
        assert references.nbytes == sum(entry[1] for entry in waiting) <= max_bytes
        for key, _, _, tensor in waiting:
            assert torch.equal(load_output(references.get(key), {"name": HIDDEN, "digest": key}), tensor)
        for key in known - {entry[0] for entry in waiting}:
            with pytest.raises(OutputGone):
                references.get(key)


def test_an_ask_names_the_outputs_it_wants(folder: Path) -> None:
    with open_engine(f"hf:{folder}", dtype="float32", outputs=True) as engine, Window(engine, HEADER) as window:
        window.append(CHUNKS[1])
        everything = window.ask(QUERY, max_tokens=2).outputs
        named = window.ask(QUERY, max_tokens=2, outputs=[HIDDEN]).outputs
        assert everything is not None and named is not None and torch.equal(named[HIDDEN], everything[HIDDEN])
        assert window.ask(QUERY, max_tokens=2, outputs=[]).outputs is None
        with pytest.raises(ValueError, match="outputs must be of hidden_states, got logits"):
            window.ask(QUERY, max_tokens=2, outputs=["logits"])
