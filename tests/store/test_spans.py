"""The typed repository: exact or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxwin.kv.deficit import deficit
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.kv.patch import Patch, form_patch
from ctxwin.kv.pooling import fit_basis, project
from ctxwin.store import codec, open_store, span_codec
from ctxwin.store.memory import MemoryStore
from ctxwin.store.span_codec import all_finite
from ctxwin.store.spans import SpanRepository
from ctxwin.store.tiered import TieredStore
from store.wrapped import FaultStore, LoggingStore

encode_tensors = partial(codec.encode_tensors, checked=False)
decode_tensors = partial(codec.decode_tensors, checked=False)
SPEC = KVSpec("model", "gqa", 2, 2, 8, 8, RopeSpec(tuple(1.0 / 10_000 ** (i / 4) for i in range(4)), 8), "float32")
IDS = [11, 12, 13, 14, 15]


def span(seed: int = 0, dtype: torch.dtype = torch.bfloat16, start: int = 7, tokens: int = 5) -> SpanKV:
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, tokens, 2, 8, generator=random).to(dtype) for _ in range(2))
    return SpanKV(k, v, torch.arange(tokens).repeat(3, 1), start)


def same(a: SpanKV, b: SpanKV) -> bool:
    pairs = ((a.k, b.k), (a.v, b.v), (a.positions, b.positions))
    return a.start == b.start and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.fixture
def repo() -> SpanRepository:
    return SpanRepository(MemoryStore(), "engine")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("live", [0, 1 << 20])
def test_a_span_comes_back_exactly(dtype: torch.dtype, live: int) -> None:
    repo = SpanRepository(MemoryStore(), "engine", live)
    put = span(dtype=dtype)
    assert repo.put_span("a", put, {"token_ids": tuple(IDS), "depth": 2})
    for _ in range(2):
        found = repo.get_span("span/a", token_ids=IDS)
        assert found is not None
        got, meta = found
        assert got.k.view(torch.uint8).equal(put.k.view(torch.uint8))
        assert got.v.view(torch.uint8).equal(put.v.view(torch.uint8))
        assert (got.start, got.positions.tolist()) == (7, put.positions.tolist())
        assert meta == {"token_ids": IDS, "depth": 2}
    assert repo.counters.hits["span"] == 2
    assert repo.store.stats().hits == (1 if live else 2)  # what is at hand is not read again


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_eight_bits_can_say_is_stored_in_eight(kind: torch.dtype, dtype: torch.dtype) -> None:
    """KV of a quantised cache comes back to the bit, in the dtype that it had; a key that was moved is stored whole."""
    repo, sizes = SpanRepository(MemoryStore(), "engine"), []
    whole, ids = span(dtype=dtype, tokens=64), list(range(64))
    k, v = (x.to(kind).to(dtype) for x in (whole.k, whole.v))
    k[0, 0, 0, 0] = -0.0
    for name, put in (("whole", whole), ("moved", replace(whole, v=v)), ("read", replace(whole, k=k, v=v))):
        repo.put_span(name, put, {"token_ids": ids})
        found = repo.get_span(name, token_ids=ids)
        assert found is not None
        for got, want in ((found[0].k, put.k), (found[0].v, put.v)):
            assert got.dtype == dtype and got.view(torch.uint8).equal(want.contiguous().view(torch.uint8))
        assert found[0].blob is not None
        sizes.append(len(found[0].blob))
    saved = whole.v.numel() * (dtype.itemsize - 1)
    assert sizes[0] - sizes[1] > saved * 0.9 and sizes[1] - sizes[2] > saved * 0.9


def test_other_tokens_are_a_miss(repo: SpanRepository, caplog: pytest.LogCaptureFixture) -> None:
    repo.put_span("a", span(), {"token_ids": IDS})
    for attempt in range(2):
        assert repo.get_span("a", token_ids=[*IDS[:-1], 99]) is None
        assert repo.get_span("a", token_ids=IDS[:-1]) is None
        assert repo.counters.mismatched == 2 * attempt + 2
        assert repo.get_span("a", token_ids=IDS) is not None
    assert repo.counters.misses["span"] == 4
    assert "span/a is of other content" in caplog.text


def test_another_model_is_a_miss_and_keeps_its_record(repo: SpanRepository) -> None:
    repo.put_span("a", span(), {"token_ids": IDS})
    repo.put_embedding("a", torch.ones(2))
    repo.put_json("a", {"x": 1})
    other = SpanRepository(repo.store, "another engine")
    assert other.get_span("a") is None
    assert other.get_embedding("a") is None
    assert other.get_json("a") is None
    assert other.counters.mismatched == 3
    assert repo.get_span("a") is not None


def test_sources_are_shared_by_models(repo: SpanRepository) -> None:
    repo.put_source("a", b"png bytes")
    assert SpanRepository(repo.store, "another engine").get_source("source/a") == b"png bytes"


def test_token_ids_are_required(repo: SpanRepository) -> None:
    for meta in ({}, {"token_ids": [1, 2]}):
        with pytest.raises(ValueError, match="must hold 5 ids"):
            repo.put_span("a", span(), meta)


def test_json(repo: SpanRepository) -> None:
    value = {"ids": [1, 2], "text": "ä", "none": None}
    assert repo.put_json("chunk/a", value)
    got = repo.get_json("chunk/a")
    assert got == value
    got["ids"].append(3)
    assert repo.get_json("a") == value
    repo.put_json("profile/m", [1])
    assert repo.get_json("profile/m") == [1]
    with pytest.raises(TypeError):
        repo.put_json("a", object())


def test_namespaces_are_kept_apart(repo: SpanRepository) -> None:
    repo.put_embedding("a", torch.ones(2))
    repo.put_source("a", b"x")
    assert repo.get_span("a") is None
    for call in (repo.get_span, repo.get_patch, repo.get_source):
        with pytest.raises(ValueError, match="must start with"):
            call("embed/a")
    assert sorted(repo.store.list()) == ["embed/a", "source/a"]


def make_patch(rank: int = 2, **options: Any) -> Patch:
    base = span(1, torch.float32, start=0, tokens=12)
    return form_patch(span(2, torch.float32, start=0, tokens=12), base, SPEC, rank=rank, **options)


@pytest.mark.parametrize("key", ["a", "patch/a", "orbit/a"])
def test_patches(repo: SpanRepository, key: str) -> None:
    patch = make_patch()
    assert repo.put_patch(key, patch)
    for _ in range(2):
        got = repo.get_patch(key)
        assert got is not None
        assert got.describe() == patch.describe()
        assert all(torch.equal(got.tensors()[n], t) for n, t in patch.tensors().items())


def test_factors_in_few_bits_count_with_the_memory_that_they_take_unpacked() -> None:
    patch = make_patch(layout="quantized")
    for room, stays in ((patch.unpacked_nbytes, False), (1 << 20, True)):
        repo = SpanRepository(MemoryStore(), "engine", room)
        repo.put_patch("a", patch)
        first, second = (repo.get_patch("a") for _ in range(2))
        assert first is not None and second is not None and torch.equal(first.left, second.left)
        assert (first is second) == stays
    assert patch.unpacked_nbytes > patch.nbytes and make_patch().unpacked_nbytes == 0


def test_a_patch_on_a_shared_basis_brings_the_basis(repo: SpanRepository) -> None:
    lost = deficit(span(2, torch.float32, 0, 12), span(1, torch.float32, 0, 12), SPEC)
    basis = fit_basis([lost], SPEC, 2)
    patch = project(lost, basis, SPEC)
    assert repo.put_patch("a", patch)
    assert repo.put_patch("b", patch)
    assert sorted(repo.store.list()) == [f"basis/{basis.id}", "patch/a", "patch/b"]
    got = SpanRepository(repo.store, "engine").get_patch("a")
    assert got is not None
    assert got.basis is not None
    assert torch.equal(got.basis.right, basis.right)
    repo.delete(f"basis/{basis.id}")
    assert SpanRepository(repo.store, "engine").get_patch("a") is None
    assert repo.contains("patch/a"), "the patch itself is sound"


def test_a_basis_that_comes_with_the_model_is_not_stored(repo: SpanRepository) -> None:
    lost = deficit(span(2, torch.float32, 0, 12), span(1, torch.float32, 0, 12), SPEC)
    basis = fit_basis([lost], SPEC, 2)
    repo.know_basis(basis)
    assert repo.put_patch("a", project(lost, basis, SPEC))
    assert list(repo.store.list()) == ["patch/a"]
    again = SpanRepository(repo.store, "engine")
    again.know_basis(fit_basis([lost], SPEC, 1))
    assert again.get_patch("a") is None and again.counters.misses["patch"] == 1, "another basis is no basis"
    again.know_basis(basis)
    got = again.get_patch("a")
    assert got is not None and got.basis is basis


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda blob: b"",
    "cut": lambda blob: blob[:-7],
    "a checksum too many": lambda blob: codec.encode_tensors(*decode_tensors(blob)),
    "pickle": lambda blob: b"\x80\x04K\x01.",
    "another kind": lambda blob: codec.encode_bytes(b"x", {"kind": "span", "key": "span/a", "identity": "engine"}),
    "no tensors": lambda blob: encode_tensors({}, decode_tensors(blob)[1]),
    "shapes": lambda blob: encode_tensors(
        decode_tensors(blob)[0] | {"positions": torch.zeros(3, 4, dtype=torch.int64)}, decode_tensors(blob)[1]
    ),
    "no meta": lambda blob: encode_tensors(decode_tensors(blob)[0]),
    "meta types": lambda blob: encode_tensors(decode_tensors(blob)[0], decode_tensors(blob)[1] | {"user": 5}),
    "another key": lambda blob: encode_tensors(decode_tensors(blob)[0], decode_tensors(blob)[1] | {"key": "span/b"}),
}


WRONG: dict[str, Callable[[SpanKV], SpanKV]] = {
    "NaN": lambda span: replace(span, k=span.k * torch.nan),
    "infinite": lambda span: replace(span, v=span.v / 0),
    "layers": lambda span: replace(span, k=span.k[:1], v=span.v[:1]),
    "heads": lambda span: replace(span, k=span.k[:, :, :1], v=span.v[:, :, :1]),
    "dimensions": lambda span: replace(span, k=span.k[..., :4]),
    "values of other tokens": lambda span: replace(span, v=span.v[:, :3]),
    "no numbers": lambda span: replace(span, k=span.k.int(), v=span.v.int()),
    "far away": lambda span: replace(span, positions=span.positions + (1 << 40)),
    "before the origin": lambda span: replace(span, positions=span.positions - 3),
    "floating positions": lambda span: replace(span, positions=span.positions.double()),
    "start": lambda span: replace(span, start=-5),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_malformed_span_is_a_miss(how: str) -> None:
    """Whoever can write to the store can write a whole record with a right checksum."""
    repo = SpanRepository(MemoryStore(), "engine", spec=SPEC)
    assert repo.put_span("a", WRONG[how](span()), {"token_ids": IDS})
    assert repo.get_span("a", token_ids=IDS) is None
    assert repo.counters.corrupt == 1
    assert repo.put_span("a", span(), {"token_ids": IDS})
    assert repo.get_span("a", token_ids=IDS) is not None


def test_a_span_is_held_against_what_is_asked_for() -> None:
    repo = SpanRepository(MemoryStore(), "engine", spec=SPEC)
    meta = {"chunk": "c", "provenance": "p", "exact": True}
    repo.put_span("a", span(), {"token_ids": IDS, **meta})
    places = span().positions.numpy()
    assert repo.get_span("a", token_ids=IDS, positions=places, **meta) is not None
    assert repo.get_span("a", positions=places + 1) is None
    assert repo.get_span("a", positions=places[:, :3]) is None
    for name, other in (("chunk", "d"), ("provenance", "q"), ("exact", False), ("unheard", 1)):
        assert repo.get_span("a", **{name: other}) is None
    assert repo.counters.mismatched == 6
    assert repo.get_span("a") is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this thread alone: torch's others would spin beside vLLM."""
    monkeypatch.setattr(torch.Tensor, "aminmax", None)
    limits, size = torch.finfo(dtype), 2 * span_codec._AT_ONCE + 3
    numbers = torch.zeros(size, dtype=torch.float64)
    numbers[:4] = torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=torch.float64)
    assert all_finite(numbers.to(dtype)) and all_finite(numbers[:0].to(dtype))
    bad = [torch.nan] if dtype is torch.float8_e4m3fn else [torch.nan, torch.inf, -torch.inf]
    for at, number in itertools.product((0, size // 2, size - 1), bad):
        broken = numbers.clone()
        broken[at] = number
        assert not all_finite(broken.to(dtype).view(1, -1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_patches_and_embeddings_with_no_numbers_are_misses(repo: SpanRepository, bad: float) -> None:
    patch = make_patch()
    repo.put_patch("a", replace(patch, left=patch.left * bad))
    repo.put_embedding("a", torch.full((2, 2), bad))
    assert repo.get_patch("a") is None
    assert repo.get_embedding("a") is None
    assert repo.counters.corrupt == 2


@pytest.mark.parametrize("how", BROKEN)
def test_whatever_cannot_be_decoded_is_a_miss(how: str, caplog: pytest.LogCaptureFixture) -> None:
    repo = SpanRepository(MemoryStore(), "engine")
    repo.put_span("a", span(), {"token_ids": IDS})
    blob = repo.store.get("span/a")
    assert blob is not None
    repo.store.put("span/a", BROKEN[how](blob))
    assert repo.get_span("a", token_ids=IDS) is None
    assert repo.counters.corrupt == 1
    assert repo.counters.misses["span"] == 1
    assert "span/a cannot be decoded" in caplog.text
    assert not repo.contains("span/a")
    assert repo.put_span("a", span(), {"token_ids": IDS})
    assert repo.get_span("a", token_ids=IDS) is not None


def test_under_faults_it_is_exact_or_nothing() -> None:
    store = FaultStore(MemoryStore(), seed=5, miss=0.2, corrupt=0.4, refuse=0.1)
    repo = SpanRepository(store, "engine", max_live_bytes=0)
    hits = 0
    for i in range(150):
        put = span(i)
        repo.put_span(str(i), put, {"token_ids": IDS})
        found = repo.get_span(str(i), token_ids=IDS)
        if found is not None:
            assert same(found[0], put)
            hits += 1
    assert hits > 30
    assert store.stats().corrupt == store.faults["corrupt"] > 20
    assert repo.counters.corrupt == 0
    assert repo.counters.refused == store.faults["refuse"] > 3
    assert repo.counters.misses["span"] == 150 - hits


class TestLive:
    def test_a_second_get_reads_nothing(self) -> None:
        store = LoggingStore(MemoryStore())
        repo = SpanRepository(store, "engine")
        repo.put_span("a", span(), {"token_ids": IDS})
        first, second = repo.get_span("a"), repo.get_span("a")
        assert store.calls["get"] == 1
        assert first is not None
        assert second is not None
        assert first[0].k is second[0].k

    def test_it_is_bounded_and_the_oldest_leaves(self) -> None:
        size = len(encode_tensors({"k": span().k, "v": span().v, "positions": span().positions})) + 300
        repo = SpanRepository(MemoryStore(), "engine", max_live_bytes=3 * size)
        for name in "abcdef":
            repo.put_span(name, span(), {"token_ids": IDS})
            repo.get_span(name)
            assert 0 < repo._live.nbytes <= 3 * size
        assert "span/f" in repo._live
        assert "span/a" not in repo._live

    @pytest.mark.parametrize("wrap", [lambda store: store, lambda store: TieredStore([store, MemoryStore()])])
    def test_all_that_a_store_holds_in_this_process_is_cached(self, wrap, monkeypatch) -> None:
        """And nothing longer than there, so that no memory is taken twice."""
        monkeypatch.setattr("ctxwin.store.spans._LIVE_BYTES", 1)
        size = len(encode_tensors({"k": span().k, "v": span().v, "positions": span().positions})) + 300
        first = MemoryStore(3 * size)
        repo = SpanRepository(wrap(first), "engine")
        for name in "abcdef":
            repo.put_span(name, span(), {"token_ids": IDS})
            kept = repo.get_span(name)
            again = repo.get_span(name)
            assert kept is not None and again is not None and kept[0].k is again[0].k
            assert sorted(key for key, _ in repo._live.items()) == sorted(first.list())
        first.delete("span/f")
        assert "span/f" not in repo._live

    def test_what_the_store_does_not_hold_in_this_process_is_bounded(self, monkeypatch, tmp_path: Path) -> None:
        """Sources are copied out of their blobs, and a first tier may be full of what is leased."""
        monkeypatch.setattr("ctxwin.store.spans._LIVE_BYTES", 5000)
        first = MemoryStore(4000)
        repo = SpanRepository(TieredStore([first, open_store(f"disk:{tmp_path}")]), "engine")
        repo.put_span("leased", span(), {"token_ids": IDS})
        assert repo.lease("span/leased")
        first.max_bytes = 1
        for number in range(20):
            repo.put_source(f"source/{number}", bytes(1000))
            repo.put_span(f"{number}", span(number), {"token_ids": IDS})
            assert repo.get_source(f"source/{number}") is not None and repo.get_span(f"{number}") is not None
            assert 0 < repo._live.nbytes <= 5000 and len(repo._live.items()) < 8

    def test_it_never_outlives_the_store(self) -> None:
        repo = SpanRepository(MemoryStore(), "engine")
        repo.put_span("a", span(), {"token_ids": IDS})
        assert repo.get_span("a") is not None
        repo.store.delete("span/a")
        assert repo.get_span("a") is None

    def test_a_put_replaces_it(self, repo: SpanRepository) -> None:
        repo.put_span("a", span(0), {"token_ids": IDS})
        repo.get_span("a")
        repo.put_span("a", span(1), {"token_ids": IDS})
        found = repo.get_span("a")
        assert found is not None
        assert same(found[0], span(1))


def test_a_slice_of_a_returned_span_can_be_stored(repo: SpanRepository) -> None:
    repo.put_span("a", span(), {"token_ids": IDS})
    found = repo.get_span("a")
    assert found is not None
    part = found[0].slice(1, 4)
    assert repo.put_span("b", part, {"token_ids": IDS[1:4]})
    again = repo.get_span("b", token_ids=IDS[1:4])
    assert again is not None
    assert same(again[0], part)
    assert same(again[0], replace(span().slice(1, 4), start=7))


def test_leases_pass_through(repo: SpanRepository) -> None:
    assert not repo.lease("span/a")
    repo.put_span("a", span(), {"token_ids": IDS})
    assert repo.lease("span/a")
    assert repo.store.stats().leased == 1
    repo.release("span/a")
    assert repo.store.stats().leased == 0


def test_spans_survive_a_restart(tmp_path: Path) -> None:
    for url in (f"disk:{tmp_path}", f"tiered:memory:,disk:{tmp_path}"):
        store = open_store(url)
        SpanRepository(store, "engine").put_span("a", span(), {"token_ids": IDS})
        store.close()
        store = open_store(url)
        found = SpanRepository(store, "engine").get_span("a", token_ids=IDS)
        assert found is not None
        assert same(found[0], span())
        store.close()


def test_a_refused_put_says_so(caplog: pytest.LogCaptureFixture) -> None:
    repo = SpanRepository(MemoryStore(100), "engine")
    assert not repo.put_span("a", span(), {"token_ids": IDS})
    assert repo.counters.refused == 1
    assert "refused span/a" in caplog.text


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="max_live_bytes"):
        SpanRepository(MemoryStore(), "engine", -1)
