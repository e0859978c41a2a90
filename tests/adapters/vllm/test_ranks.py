"""KV heads of tensor parallel ranks: pure shares, and two ranks around one store that knows nothing of them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.kv.relocate import canonicalise, relocate
from ctxwin.store import codec, open_store
from ctxwin.store.spans import SpanRepository
from ctxwin_vllm.ranks import gather, gather_stages, own_heads

LAYERS, TOKENS = 3, 17


def layout(family: str, heads: int) -> KVSpec:
    k_dim, v_dim = (8, 24) if family == "mla" else (32, 32)
    pairing = "interleaved" if family == "mla" else "half"
    rope = RopeSpec(tuple(1e4 ** (-i / (k_dim // 2)) for i in range(k_dim // 2)), k_dim, pairing)  # type: ignore[arg-type]
    return KVSpec("test", family, LAYERS, heads, k_dim, v_dim, rope, "bfloat16")  # type: ignore[arg-type]


def span(kv: KVSpec, seed: int, start: int = 0) -> SpanKV:
    generator = torch.Generator().manual_seed(seed)

    def some(dim: int) -> torch.Tensor:
        return torch.randn(LAYERS, TOKENS, kv.heads, dim, generator=generator).to(torch.bfloat16)

    return SpanKV(some(kv.k_dim), some(kv.v_dim), torch.arange(TOKENS).expand(3, TOKENS).contiguous(), start)


class TestShares:
    def test_by_hand(self) -> None:
        assert [own_heads(8, rank, 2) for rank in range(2)] == [slice(0, 4), slice(4, 8)]
        assert [own_heads(2, rank, 2) for rank in range(2)] == [slice(0, 1), slice(1, 2)]
        # Two heads on four ranks: copies lie side by side, as in vLLM's QKVParallelLinear.
        assert [own_heads(2, rank, 4) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
        assert [own_heads(1, rank, 2) for rank in range(2)] == [slice(0, 1)] * 2
        assert own_heads(5, 0, 1) == slice(0, 5)

    @given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 3))
    def test_a_cut_span_is_whole_again(self, heads_log: int, size_log: int, dim: int) -> None:
        heads, size = 2**heads_log, 2**size_log
        whole = torch.arange(2 * 3 * heads * dim).view(2, 3, heads, dim)
        shares = [own_heads(heads, rank, size) for rank in range(size)]
        assert all(share.stop - share.start == max(1, heads // size) for share in shares)
        assert torch.equal(gather([whole[:, :, share] for share in shares], heads), whole)
        for cut in (1, 2):  # a pipeline of two stages
            parts = [layers[:, :, share] for layers in (whole[:cut], whole[cut:]) for share in shares]
            assert torch.equal(gather_stages(parts, heads, 2), whole)

    @pytest.mark.parametrize(("heads", "size"), [(3, 2), (2, 3), (6, 4), (4, 6)])
    def test_uneven(self, heads: int, size: int) -> None:
        with pytest.raises(ValueError, match="set tensor_parallel_size"):
            own_heads(heads, 0, size)

    @pytest.mark.parametrize(("heads", "rank", "size"), [(0, 0, 1), (2, 0, 0), (2, 2, 2), (2, -1, 2)])
    def test_out_of_range(self, heads: int, rank: int, size: int) -> None:
        with pytest.raises(ValueError, match="got"):
            own_heads(heads, rank, size)

    @pytest.mark.vllm
    @pytest.mark.parametrize(("heads", "size"), [(4, 2), (1, 2), (2, 4), (8, 8)])
    def test_as_vllm_loads_weights(self, heads: int, size: int) -> None:
        """vLLM's own layer, given weights whose rows are numbered by head, keeps those of our heads on each rank."""
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers import linear

        dim, hidden = 4, 2
        weight = torch.arange(heads).repeat_interleave(dim)[:, None].expand(heads * dim, hidden).float()
        for rank in range(size):
            with (
                set_current_vllm_config(VllmConfig()),
                mock.patch.object(linear, "get_tensor_model_parallel_rank", return_value=rank),
                mock.patch.object(linear, "get_tensor_model_parallel_world_size", return_value=size),
                mock.patch("vllm.model_executor.parameter.get_tensor_model_parallel_rank", return_value=rank),
                mock.patch("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", return_value=size),
            ):
                layer = linear.QKVParallelLinear(hidden, dim, max(heads, size), heads, bias=False)
                layer.weight_loader(layer.weight, weight, "k")
            queries = max(heads, size) // size * dim
            own = own_heads(heads, rank, size)
            rows = layer.weight.data[queries : queries + (own.stop - own.start) * dim, 0]
            assert rows.tolist() == [float(head) for head in range(own.start, own.stop) for _ in range(dim)]

    def test_parts_that_do_not_belong_together(self) -> None:
        good = torch.zeros(2, 3, 1, 4)
        for parts in (
            [],
            [good, torch.zeros(2, 4, 1, 4)],
            [good, torch.zeros(2, 3, 2, 4)],
            [good, torch.zeros(2, 3, 1, 4, dtype=torch.float64)],
            [good],
        ):
            with pytest.raises(ValueError, match="got"):
                gather(parts, 2)


def run_rank(kv: KVSpec, folder: Path, rank: int) -> None:
    """What a process of one of two ranks makes of the spans: loaded, cut to its heads, placed, and handed back."""
    own = own_heads(kv.heads, rank, 2)
    share = replace(kv, heads=own.stop - own.start)
    with closing(open_store(f"disk:{folder / 'store'}")) as store:
        repo = SpanRepository(store, "test")
        for name, start in STARTS.items():
            found = repo.get_span(f"span/{name}")
            assert found is not None
            whole = found[0]
            mine = replace(whole, k=whole.k[:, :, own], v=whole.v[:, :, own])
            mine.validate(share)
            placed = relocate(mine, share, start)
            # What a rank's paged cache holds: its own heads, nothing of the others.
            k, v = torch.empty_like(placed.k), torch.empty_like(placed.v)
            k.copy_(placed.k)
            v.copy_(placed.v)
            (folder / f"{name}.{rank}").write_bytes(codec.encode_tensors({"k": k, "v": v}))


LAYOUTS = [("gqa", 4), ("gqa", 2), ("gqa", 1), ("mla", 1)]
STARTS = {"canonical": 123, "conditioned": 123}


def spans_of(kv: KVSpec) -> dict[str, SpanKV]:
    return {"canonical": span(kv, 1), "conditioned": span(kv, 2, start=40)}


@pytest.mark.parametrize(("family", "heads"), LAYOUTS)
def test_two_ranks_around_one_store(tmp_path: Path, family: str, heads: int) -> None:
    """Each rank slices at load and hands its share back; joined, nothing tells that there were two."""
    kv, folder = layout(family, heads), tmp_path
    with closing(open_store(f"disk:{folder / 'store'}")) as opened:
        repo = SpanRepository(opened, "test")
        for name, made in spans_of(kv).items():
            assert repo.put_span(f"span/{name}", made, {"token_ids": list(range(TOKENS))})
    for rank in range(2):
        run_rank(kv, folder, rank)
    canonical = spans_of(kv)["canonical"]

    def joined(name: str) -> SpanKV:
        parts = [codec.decode_tensors((folder / f"{name}.{rank}").read_bytes())[0] for rank in range(2)]
        if heads > 1:
            assert parts[0]["k"].shape[2] == heads // 2 and not torch.equal(parts[0]["k"], parts[1]["k"])
        k, v = (gather([part[side] for part in parts], heads) for side in ("k", "v"))
        return replace(canonical, k=k, v=v, start=STARTS[name])

    whole = {name: relocate(made, kv, STARTS[name]) for name, made in spans_of(kv).items()}
    for name, expected in whole.items():
        found = joined(name)
        assert torch.equal(found.k, expected.k) and torch.equal(found.v, expected.v)
        assert found.k.shape == (LAYERS, TOKENS, heads, kv.k_dim)
        # And stored again, it is the record that one rank would have stored.
        assert torch.equal(canonicalise(found, kv).k, canonicalise(expected, kv).k)

    formed = [form_patch(s["conditioned"], s["canonical"], kv, rank=4) for s in (whole, {n: joined(n) for n in whole})]
    tensors = [patch.tensors() for patch in formed]
    assert tensors[0].keys() == tensors[1].keys() and len(tensors[0]) > 0
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])

    # A patch is applied before the heads are cut: its factors run over all of them.
    served = apply_patch(canonical, formed[1], kv, 200)
    shares = [own_heads(heads, rank, 2) for rank in range(2)]
    assert torch.equal(gather([served.k[:, :, share] for share in shares], heads), served.k)
