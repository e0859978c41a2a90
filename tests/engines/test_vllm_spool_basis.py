"""Patches over a shared basis between processes: the directions are written once, and are those of the patch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxwin.engines.vllm.spool import Spool, SpoolReader
from ctxwin.engines.vllm.transfers import Placed, Transfer
from ctxwin.errors import StoreCorrupt
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.deficit import deficit
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.kv.patch import form_patch
from ctxwin.kv.pooling import fit_basis, project

KV = KVSpec(
    identity="m", family="gqa", layers=2, heads=2, k_dim=4, v_dim=4, dtype="float32",
    rope=RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4),
)  # fmt: skip


def span(seed: int) -> SpanKV:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 5, 2, 4, generator=generator) for _ in range(2))
    return SpanKV(k, v, torch.arange(5).expand(3, 5).contiguous(), 0)


def placed(i: int, basis: SharedBasis | None) -> Placed:
    base = span(2 * i)
    lost = deficit(span(2 * i + 1), base, KV)
    patch = form_patch(span(2 * i + 1), base, KV, rank=2) if basis is None else project(lost, basis, KV)
    return Placed(5 * i, base, 5 * i, patch, f"span {i}", f"patch {i}")


def test_a_shared_basis_is_written_once_and_read_once(tmp_path: Path) -> None:
    basis = fit_basis([deficit(span(1), span(0), KV)], KV, 3)
    spool = Spool(KV, tmp_path)
    reader = SpoolReader(spool.name)
    transfers = [
        Transfer(loads=(placed(0, basis), placed(1, basis), placed(2, None))),
        Transfer(loads=(placed(3, basis),)),
    ]
    handles = [spool.add(transfer) for transfer in transfers]
    files = list(spool.path.glob("basis-*"))
    assert len(files) == 1
    assert all(p.stat().st_size < files[0].stat().st_size + 1000 for p in spool.path.glob("patch-*"))
    seen = []
    for handle, transfer in zip(handles, transfers, strict=True):
        for entry, given in zip(reader.loads(handle), transfer.loads, strict=True):
            assert entry.patch is not None and given.patch is not None
            got = reader.patch(entry.patch, entry.basis)
            assert got.describe() == given.patch.describe()
            for layer in range(2):
                for ours, theirs in zip(got.delta(layer) or (), given.patch.delta(layer) or (), strict=True):
                    assert torch.equal(ours, theirs)
            seen.append(got.basis)
    assert seen[2] is None and seen[0] is seen[1] is seen[3] is not None
    for handle in handles:
        spool.remove(handle)
    assert files[0].exists(), "kept for later requests, as spans are"
    spool.close()


def test_another_basis_or_none_fails_the_load(tmp_path: Path) -> None:
    basis, other = (fit_basis([deficit(span(i + 1), span(i), KV)], KV, 3) for i in (0, 6))
    spool = Spool(KV, tmp_path)
    reader = SpoolReader(spool.name)
    first = reader.loads(spool.add(Transfer(loads=(placed(0, basis),))))[0]
    second = reader.loads(spool.add(Transfer(loads=(placed(1, other),))))[0]
    assert first.patch is not None and first.basis is not None and second.basis is not None
    for wrong in (None, second.basis):
        with pytest.raises(StoreCorrupt, match="basis must be"):
            reader.patch(first.patch, wrong)
    path = spool.path / first.basis
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreCorrupt):
        SpoolReader(spool.name).patch(first.patch, first.basis)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        SpoolReader(spool.name).patch(first.patch, first.basis)
    spool.close()
