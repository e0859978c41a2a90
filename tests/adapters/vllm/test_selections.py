"""What an answer keeps of its prompt, taken from copies that workers keep: each rank's layers and heads, merged or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin_vllm.paged import PagedKV
from ctxwin_vllm.resident import ResidentSpans, Selection
from ctxwin_vllm.transport import SharedMemoryTransport, Transfer
from ctxwin_vllm.transport.base import ALL, SUMS
from ctxwin_vllm.transport.endpoint import SharedMemoryEndpoint

KV = KVSpec(
    identity="m", family="gqa", layers=4, heads=2, k_dim=4, v_dim=6, dtype="float32",
    rope=RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4),
)  # fmt: skip
TOKENS = 40
RANKS = [(range(2 * stage, 2 * stage + 2), slice(head, head + 1)) for stage in range(2) for head in range(2)]


def prompt(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    kv = {"k": torch.randn(4, TOKENS, 2, 4, generator=noise), "v": torch.randn(4, TOKENS, 2, 6, generator=noise)}
    return kv | {SUMS: torch.rand(4, TOKENS, generator=noise)}


class Workers:
    """Two stages of two ranks, each with room for ``nbytes`` of copies."""

    def __init__(self, transport: SharedMemoryTransport, nbytes: int) -> None:
        self.transport, transport.ranks, transport.stages = transport, 4, 2
        self.copies = [ResidentSpans(torch.device("cpu"), layers, nbytes) for layers, _ in RANKS]
        self.ends = [SharedMemoryEndpoint(transport.source) for _ in RANKS]
        for rank, (end, copies) in enumerate(zip(self.ends, self.copies, strict=True)):
            paged: Any = SimpleNamespace(keep=copies.keep, resident=copies)
            paged.select = partial(PagedKV.select, paged)
            end.rank, end.paged = rank, paged

    def capture(self, want: dict[str, torch.Tensor]) -> Transfer:
        handle = self.transport.add(transfer := Transfer(captures={ALL: (0, None)}))
        for end, (layers, heads) in zip(self.ends, RANKS, strict=True):
            own = {name: want[name][layers.start : layers.stop, :, heads].contiguous() for name in "kv"}
            end.write_capture(handle, ALL, own | {SUMS: want[SUMS][layers.start : layers.stop]})
        self.transport.collect(handle, transfer, True)
        self.transport.remove(handle)
        return transfer

    def load(self, transfer: Transfer) -> list[Any]:
        """Load it on all ranks; return the parts with their copies."""
        handle = self.transport.add(transfer)
        try:
            ends = zip(self.ends, self.copies, RANKS, strict=True)
            return [copies.attach(end.parts(handle, 0, transfer.covered), heads)[0] for end, copies, (_, heads) in ends]
        except LookupError as error:
            self.ends[0].fail(handle, error)
            self.transport.collect(handle, transfer, True)
            raise
        finally:
            self.transport.remove(handle)


def loading(workers: Workers, origin: Any, selection: Selection) -> Transfer | None:
    span = workers.transport.select(origin, selection)
    if span is None:
        return None
    assert span.k.is_meta and span.tokens == len(selection.slots)
    filler = Encoded("", (0,) * span.tokens, span.positions.numpy(), TOKENS)
    return Transfer(loads=(Segment(filler, 0, span=span, approximate=True, merged=True),))


@pytest.fixture
def transport(tmp_path: Path) -> Any:
    opened = SharedMemoryTransport(KV, tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("merged", [0, 12])
def test_each_rank_takes_its_own_of_what_is_kept(transport: SharedMemoryTransport, merged: int) -> None:
    """As it would be taken of all of it, and again of the same copy; a name and slots cross, and no KV."""
    workers, want = Workers(transport, 1 << 20), prompt(1)
    captured = workers.capture(want)
    assert torch.equal(captured.captured[ALL][0], want["k"]) and captured.sums is not None
    for slots in (torch.arange(0, merged or TOKENS, 3), torch.tensor([0, 1, 5, 11])):
        selection = Selection(slots, merged, captured.sums if merged else None)
        k, v = selection.apply(want["k"], want["v"])
        assert k.shape[1] == len(slots) and (merged > 0) != torch.equal(k, want["k"][:, slots])
        transfer = loading(workers, captured.origins[ALL], selection)
        assert transfer is not None
        for part, (layers, heads) in zip(workers.load(transfer), RANKS, strict=True):
            assert part.resident.first == layers.start and part.span.k.is_meta
            assert torch.equal(part.resident.k, k[layers.start : layers.stop, :, heads])
            assert torch.equal(part.resident.v, v[layers.start : layers.stop, :, heads])
    assert not any(copies.copied_bytes for copies in workers.copies)


def test_a_copy_that_gives_way_is_missed_once(transport: SharedMemoryTransport) -> None:
    """A load that comes too late for it fails; then, and without room for a copy, the engine has to send the KV."""
    workers, slots = Workers(transport, 1 << 20), Selection(torch.arange(30))
    origin = workers.capture(prompt(1)).origins[ALL]
    transfer = loading(workers, origin, slots)
    workers.copies[2].clear()
    assert transfer is not None
    with pytest.raises(FileNotFoundError, match="given way"):
        workers.load(transfer)
    assert loading(workers, origin, slots) is None
    origin = workers.capture(prompt(2)).origins[ALL]
    transfer = loading(workers, origin, slots)
    assert transfer is not None
    for copies in workers.copies:  # as the file says that they are kept
        copies.get = lambda origin: None  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="given way"):
        workers.load(transfer)
    assert loading(workers, origin, slots) is None
    small = Workers(transport, TOKENS * 4 * 4 * 2)
    assert loading(small, small.capture(prompt(3)).origins[ALL], slots) is None
    assert not any(copies.nbytes for copies in small.copies)


def test_copies_go_with_the_answer(transport: SharedMemoryTransport) -> None:
    """The prompt's and what was taken of it, at the latest with the next answer's."""
    workers = Workers(transport, 1 << 20)
    whole = TOKENS * 2 * (4 + 6) * 4
    for seed in range(5):
        captured = workers.capture(prompt(seed))
        transfer = loading(workers, captured.origins[ALL], Selection(torch.arange(30)))
        assert transfer is not None
        workers.load(transfer)
        del captured, transfer
    transport.remove(transport.add(Transfer()))
    assert not list(transport.path.glob("kept-*")) and not list(transport.path.glob("span-*"))
    workers.capture(prompt(9))
    assert all(copies.nbytes <= 3 * whole for copies in workers.copies)
