"""The shared-memory transport: what crosses between processes, once, checked, and gone with its owner."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, replace
from multiprocessing import shared_memory as shared_memory_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import StoreCorrupt
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.deficit import deficit
from ctxwin.kv.kernels.load_stream import LoadStream
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.kv.patch import form_patch
from ctxwin.kv.pooling import fit_basis, project
from ctxwin.kv.states import named
from ctxwin.store import codec, open_store
from ctxwin.store.spans import SpanRepository
from ctxwin_vllm.lifecycle import folders
from ctxwin_vllm.paged_states import PagedStates
from ctxwin_vllm.resident import ResidentSpans
from ctxwin_vllm.stage_outputs import StageOutputs
from ctxwin_vllm.transport import LocalTransport, RequestMeta, SharedMemoryTransport, Transfer
from ctxwin_vllm.transport import endpoint as endpoints
from ctxwin_vllm.transport.base import SaveSpec, is_reserved, new_handle
from ctxwin_vllm.transport.endpoint import SharedMemoryEndpoint
from ctxwin_vllm.transport.shared_memory import STEPS

KV = KVSpec(
    identity="m", family="gqa", layers=2, heads=2, k_dim=4, v_dim=4, dtype="float32",
    rope=RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4),
)  # fmt: skip


def span(seed: int) -> SpanKV:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, 5, 2, 4, generator=generator) for _ in range(2))
    return SpanKV(k, v, torch.arange(5).expand(3, 5).contiguous(), 0)


def segment(i: int, basis: SharedBasis | None) -> Segment:
    base = span(2 * i)
    lost = deficit(span(2 * i + 1), base, KV)
    patch = form_patch(span(2 * i + 1), base, KV, rank=2) if basis is None else project(lost, basis, KV)
    encoded = Encoded(f"chunk {i}", tuple(range(5)), np.tile(np.arange(5), (3, 1)), 5)
    return Segment(encoded, 5 * i, base, span_key=f"span {i}", patch=patch, patch_key=f"patch {i}")


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[SharedMemoryTransport]:
    opened = SharedMemoryTransport(KV, tmp_path)
    yield opened
    opened.close()


def test_a_shared_basis_is_written_once_and_read_once(transport: SharedMemoryTransport) -> None:
    basis = fit_basis([deficit(span(1), span(0), KV)], KV, 3)
    endpoint = SharedMemoryEndpoint(transport.source)
    transfers = [
        Transfer(loads=(segment(0, basis), segment(1, basis), segment(2, None))),
        Transfer(loads=(segment(3, basis),)),
    ]
    handles = [transport.add(transfer) for transfer in transfers]
    files = list(transport.path.glob("basis-*"))
    assert len(files) == 1
    assert all(p.stat().st_size < files[0].stat().st_size + 1000 for p in transport.path.glob("patch-*"))
    seen = []
    for handle, transfer in zip(handles, transfers, strict=True):
        for part, given in zip(endpoint.parts(handle, 0, transfer.covered), transfer.loads, strict=True):
            assert part.patch is not None and given.patch is not None
            assert part.patch.describe() == given.patch.describe()
            for layer in range(2):
                for ours, theirs in zip(part.patch.delta(layer) or (), given.patch.delta(layer) or (), strict=True):
                    assert torch.equal(ours, theirs)
            seen.append(part.patch.basis)
    assert seen[2] is None and seen[0] is seen[1] is seen[3] is not None
    for handle in handles:
        transport.remove(handle)
    assert files[0].exists(), "kept for later requests, as spans are"


def test_loads_begin_behind_what_the_prefix_cache_holds(transport: SharedMemoryTransport) -> None:
    """A request that finds less of it loads nothing, as no load has it."""
    endpoint, local = SharedMemoryEndpoint(transport.source), LocalTransport(KV)
    transfer = Transfer(loads=(segment(0, None), segment(1, None)), expected_hit=8)
    assert transfer.covered == 18
    for here, handle in ((endpoint, transport.add(transfer)), (local, local.add(transfer))):
        meta = here.request_meta(handle)
        assert meta is not None
        assert [meta.tokens_to_load(hit, 30) for hit in (0, 4, 8, 12, 18, 20)] == [0, 0, 10, 6, 0, 0]
        for hit in (8, 11, 14):
            parts = here.parts(handle, hit, 18)
            assert sum(part.end - part.begin for part in parts) == 18 - hit
            assert [part.begin for part in parts] == [(hit - 8) % 5, *[0] * (len(parts) - 1)]
            assert torch.equal(parts[-1].span.k, transfer.loads[-1].span.k)  # type: ignore[union-attr]
    local.close()


def test_another_basis_or_none_fails_the_load(transport: SharedMemoryTransport) -> None:
    basis, other = (fit_basis([deficit(span(i + 1), span(i), KV)], KV, 3) for i in (0, 6))
    handles = [transport.add(Transfer(loads=(segment(i, b),))) for i, b in enumerate((basis, other))]
    job = transport.path / f"job-{handles[0]}.json"
    written = job.read_text()
    mine, wrong = (json.loads((transport.path / f"job-{h}.json").read_text())["loads"][0]["basis"] for h in handles)
    for given in (None, wrong):
        job.write_text(written.replace(json.dumps(mine), json.dumps(given)))
        with pytest.raises(StoreCorrupt, match="basis must be"):
            SharedMemoryEndpoint(transport.source).parts(handles[0], 0, 5)
    job.write_text(written)
    path = transport.path / mine[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreCorrupt):
        SharedMemoryEndpoint(transport.source).parts(handles[0], 0, 5)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        SharedMemoryEndpoint(transport.source).parts(handles[0], 0, 5)


@pytest.mark.parametrize("at", [0, 7, 200, -1])
def test_a_file_with_one_bit_turned_fails_the_load(transport: SharedMemoryTransport, at: int) -> None:
    handle = transport.add(Transfer(loads=(segment(0, None),)))
    (path,) = transport.path.glob("span-*")
    blob = bytearray(path.read_bytes())
    blob[at] ^= 4
    path.write_bytes(blob)
    with pytest.raises(StoreCorrupt, match="not what the engine wrote"):
        SharedMemoryEndpoint(transport.source).parts(handle, 0, 5)


def test_a_capture_with_one_bit_turned_is_not_taken(transport: SharedMemoryTransport) -> None:
    endpoint, want = SharedMemoryEndpoint(transport.source), span(0)
    states = {"ssm.0": torch.tensor(0.5).bfloat16(), "conv.0": torch.zeros(0, 3), "odd": torch.arange(7).bool()}
    transfer = Transfer(captures={"0": (0, 5)})
    handle = transport.add(transfer)
    turned = want.k.transpose(0, 1).contiguous().transpose(0, 1)
    endpoint.write_capture(handle, "0", {"k": turned, "v": want.v} | named(states))
    (path,) = transport.path.glob("out-*")
    blob = path.read_bytes()
    for at in [*range(0, len(blob), 61), len(blob) - 1]:
        if at < 32 or any(blob[at - at % 8 : at - at % 8 + 8]):  # else it may be padding
            path.write_bytes(blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :])
            damaged = replace(transfer)
            transport.collect(handle, damaged, True)
            assert isinstance(damaged.error, StoreCorrupt) and not damaged.captured
    path.write_bytes(blob)
    transport.collect(handle, transfer, True)
    assert transfer.error is None
    assert all(torch.equal(x, y) for x, y in zip(transfer.captured["0"], (want.k, want.v), strict=True))
    assert all(torch.equal(transfer.states["0"][name], states[name]) for name in states)


def test_on_a_gpu_captures_are_written_by_a_thread_behind_the_step(
    transport: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on while it waits for what is read; where that fails, the engine is told, and others are written."""
    endpoint, may_write, events = SharedMemoryEndpoint(transport.source), threading.Event(), []
    loads = LoadStream(torch.device("cpu"))
    monkeypatch.setattr(loads, "reading", lambda event: [events.append(event), may_write.wait(), nullcontext()][-1])
    reads = {"0": (span(0).k, span(0).v), "1": (span(1).k, torch.zeros(0))}
    endpoint.paged: Any = SimpleNamespace(
        loads=loads, read=lambda blocks, begin, end: reads[str(begin)], keep=lambda *copy: False
    )
    endpoint.behind, transfers = True, [Transfer(captures={str(i): (i, None)}) for i in range(2)]
    handles = [transport.add(transfer) for transfer in transfers]
    monkeypatch.setattr(endpoints, "to_host", lambda k, v: (k, v.view_as(k)))
    for i, handle in enumerate(handles[::-1]):
        endpoint.save(SaveSpec(endpoint.path.name, handle, "", (), {str(1 - i): (1 - i, 5)}))
    assert not list(transport.path.glob("out-*")), "the step does not wait"
    may_write.set()
    endpoint.flush()
    assert len(events) == 2 and None not in events
    for handle, transfer in zip(handles, transfers, strict=True):
        transport.collect(handle, transfer, True)
    assert torch.equal(transfers[0].captured["0"][0], span(0).k) and transfers[0].error is None
    assert "invalid for input of size 0" in str(transfers[1].error)


class OnDevice(torch.Tensor):
    """A tensor whose copies to the host name the thread that waits for them; those of NaN fail."""

    waiting: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        got = super().__torch_function__(func, types, args, kwargs or {})
        if func not in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item):
            return got
        cls.waiting.append(threading.current_thread().name)
        got = got.as_subclass(torch.Tensor)
        if got.isnan().any():
            raise RuntimeError("a lost device")
        return got


def test_states_and_stage_outputs_keep_no_step_waiting(transport: SharedMemoryTransport) -> None:
    """They are copied where they lie, as the KV is, before others get their blocks; a thread brings them to the host."""
    conv, recurrent = (torch.randn(3, *shape).as_subclass(OnDevice) for shape in ((4, 2), (2, 4, 4)))
    rows = torch.randn(16, 6).as_subclass(OnDevice)
    local, endpoint = LocalTransport(KV), SharedMemoryEndpoint(transport.source)
    endpoint.behind = True
    for end, sender in ((local, local), (endpoint, transport)):
        end.paged = SimpleNamespace(
            loads=LoadStream(torch.device("cpu")),
            read=lambda blocks, begin, end: (span(0).k, span(0).v),
            keep=lambda *copy: False,
            slots=lambda blocks, begin, end: torch.arange(begin, end),
        )
        end.states = PagedStates({"layers.1": SimpleNamespace(kv_cache=(conv, recurrent))}, [["layers.1"]])
        end.outputs = StageOutputs.__new__(StageOutputs)
        end.outputs._rows = {"hidden": rows}
        transfers, OnDevice.waiting[:] = [Transfer(captures={"0": (0, 5)}) for _ in range(2)], []
        handles = [sender.add(transfer) for transfer in transfers]
        want = {"1.conv": conv[1].clone(), "1.recurrent": recurrent[1].clone()}, rows[:5].clone()
        with mock.patch.object(endpoint, "_writer", ThreadPoolExecutor(1, "writer")) as writer:
            writer.submit((may_write := threading.Event()).wait)
            for i, handle in enumerate(handles):
                save = SaveSpec(end.source if end is local else "", handle, "", (), {"0": (0, 5)}, (1,), 5)
                assert local.read_now(save, transfers[i]) if end is local else endpoint.save(save) is None
                local.read_ended()
                for tensor in (conv, recurrent, rows):
                    tensor[:] = torch.nan  # another request's, or nobody's
            assert not OnDevice.waiting
            may_write.set()
            endpoint.flush()
        for handle, transfer in zip(handles, transfers, strict=True):
            sender.collect(handle, transfer, True)
        assert transfers[0].error is None and OnDevice.waiting == ["writer_0"] * (4 if end is endpoint else 0)
        for name, state in want[0].items():
            assert torch.equal(transfers[0].states["0"][name], state)
        assert torch.equal(transfers[0].outputs["0"]["hidden"], want[1])
        if end is endpoint:
            assert "a lost device" in str(transfers[1].error)
        for tensor in (conv, recurrent, rows):
            tensor[:] = 1.0
    local.outputs = None
    local.close()


def test_what_all_workers_keep_crosses_no_more(transport: SharedMemoryTransport) -> None:
    """Its names and positions do. Whoever lost its copy is sent the KV; a load that comes too late for that fails alone."""
    transport.ranks, heads = 2, [slice(rank, rank + 1) for rank in range(2)]
    workers, copies = [], [ResidentSpans(torch.device("cpu"), range(2), 1 << 20) for _ in heads]
    for rank, resident in enumerate(copies):
        workers.append(SharedMemoryEndpoint(transport.source))
        workers[rank].rank, workers[rank].paged = rank, SimpleNamespace(keep=resident.keep)

    def captured(seed: int) -> Segment:
        transfer, want = Transfer(captures={"0": (0, 5)}), span(seed)
        handle = transport.add(transfer)
        for name in transfer.captures:
            for worker, own in zip(workers, heads, strict=True):
                kv = {"k": want.k[:, :, own].contiguous(), "v": want.v[:, :, own].contiguous()}
                worker.write_capture(handle, name, kv)
        transport.collect(handle, transfer, True)
        transport.remove(handle)
        made = SpanKV(*transfer.captured["0"], want.positions, 0)
        object.__setattr__(made, "origin", transfer.origins["0"])
        return replace(segment(seed, None), span=made, patch=None, patch_key="")

    def load(given: Segment) -> str:
        """Load it on both ranks; return the names of what crossed, and whether the KV was there."""
        handle, found = transport.add(Transfer(loads=(given,))), set()
        try:
            for worker, resident, own in zip(workers, copies, heads, strict=True):
                (part,) = resident.attach(worker.parts(handle, 0, 5), own)
                assert part.resident is not None and torch.equal(part.span.positions, given.span.positions)
                assert torch.equal(part.resident.k, given.span.k[:, :, own])
                assert torch.equal(part.resident.v, given.span.v[:, :, own])
                found.add("copy" if part.span.k.is_meta else "whole")
        finally:
            transport.remove(handle)
        (kind,) = found
        return kind

    first, second = captured(0), captured(1)
    whole = first.span.nbytes
    assert [load(first), load(second), load(first)] == ["copy"] * 3 and not any(c.copied_bytes for c in copies)
    assert all(resident.nbytes == whole for resident in copies), "halves of two spans"
    copies[1].clear()
    assert [load(first), load(first)] == ["whole"] * 2 and len(list(transport.path.glob("kept-*"))) == 1
    handle = transport.add(lost := Transfer(loads=(captured(2),)))
    copies[0].clear()
    with pytest.raises(LookupError, match="has given way"):
        workers[0].parts(handle, 0, 5)
    (part,) = workers[1].parts(handle, 0, 5)
    copies[1].clear()
    with pytest.raises(LookupError, match="has given way"):
        copies[1].attach([part], heads[1])
    workers[0].fail(handle, LookupError("given way"))
    transport.collect(handle, lost, True)
    transport.remove(handle)
    assert "given way" in str(lost.error) and load(lost.loads[0]) == "whole"
    third = captured(3)
    assert load(third) == "copy"
    del first, second, third, lost, part
    transport.remove(transport.add(Transfer()))
    assert not list(transport.path.glob("kept-*")) and not list(transport.path.glob("span-*"))
    assert [load(captured(seed)) for seed in range(4, 16)] == ["copy"] * 12
    assert all(resident.nbytes <= 2 * whole for resident in copies), "a copy goes with its span"


def test_full_shared_memory_is_said_and_some_is_left_to_vllm(transport: SharedMemoryTransport) -> None:
    """Its queues lie there, too: a page that cannot be had kills the process that writes it."""
    endpoint, size = SharedMemoryEndpoint(transport.source), 1 << 30
    waiting = transport.add(Transfer(captures={"0": (0, 5)}))
    with mock.patch("shutil.disk_usage", return_value=(size, size - (1 << 20), 1 << 20)):
        with pytest.raises(OSError, match=r"must have room for .* free some"):
            transport.add(Transfer(loads=(segment(0, None),)))
        assert not list(transport.path.glob("span-*"))
        with pytest.raises(OSError, match="must have room"):
            endpoint.write_capture(waiting, "0", {"k": span(0).k, "v": span(0).v})
        endpoint.fail(waiting, OSError("no room"))  # what says so is small
        transfer = Transfer(captures={"0": (0, 5)})
        transport.collect(waiting, transfer, True)
        assert "no room" in str(transfer.error)
    assert transport.add(Transfer(loads=(segment(0, None),)))


def test_segments_of_a_killed_group_go_with_its_folder(tmp_path: Path) -> None:
    """Nobody is left to remove what vLLM mapped: the next engine does, by the names that the first one left."""
    made = shared_memory_module.SharedMemory(create=True, size=64)
    try:
        transport = SharedMemoryTransport(KV, tmp_path)
        transport.remember_segments({made.name, "../etc", "other"})
        with mock.patch("shutil.rmtree"):  # as where its process was killed
            transport.close()
        with mock.patch.object(folders, "runs", return_value=False):
            SharedMemoryTransport(KV, tmp_path).close()
        assert not Path("/dev/shm", made.name).exists()
    finally:
        made.close()


def test_a_span_from_a_store_crosses_as_the_bytes_that_were_read(
    transport: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One digest where it leaves the store, one where it enters the worker, none between."""
    repo = SpanRepository(open_store("memory:"), KV.identity, max_live_bytes=0)
    repo.put_span("span/s", span(0), {"token_ids": list(range(5))})
    found = repo.get_span("span/s")
    assert found is not None and found[0].blob is not None
    assert replace(found[0], start=3).blob is None and found[0].slice(1, 2).blob is None
    loaded = replace(segment(0, None), span=found[0], patch=None, patch_key="")
    with mock.patch.object(codec, "encode_tensors", side_effect=AssertionError("encoded again")):
        handle = transport.add(Transfer(loads=(loaded,)))
    (part,) = SharedMemoryEndpoint(transport.source).parts(handle, 1, 4)
    assert (part.begin, part.stop) == (1, 4)
    assert torch.equal(part.span.k, span(0).k) and torch.equal(part.span.positions, span(0).positions)


def mapped(folder: Path) -> list[str]:
    """Files of a folder, removed ones included, that this process has in its memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_spans_are_mapped_and_leave_with_their_files(transport: SharedMemoryTransport) -> None:
    """A worker's memory is the folder's, and what the engine has forgotten or evicted does not stay in it."""
    endpoint, held = SharedMemoryEndpoint(transport.source), []

    def load(numbers: range) -> None:
        for i in numbers:
            held.append(segment(i, None))
            handle = transport.add(Transfer(loads=(held[-1],)))
            (part,) = endpoint.parts(handle, 0, 5)
            assert torch.equal(part.span.k, span(2 * i).k)
            transport.remove(handle)

    load(range(40))
    assert len(mapped(transport.path)) == 80, "a span and a patch each"
    for file in [*transport.path.glob("span-*"), *transport.path.glob("patch-*")]:
        file.unlink()
    load(range(100, 125))
    left = mapped(transport.path)
    assert len(left) == 50 and not any("(deleted)" in line for line in left)


def test_the_folder_holds_what_a_later_request_can_use(transport: SharedMemoryTransport) -> None:
    """A file serves the tensor that it was written from: with that it goes, and with it what vLLM has mapped and read."""
    endpoint, kept = SharedMemoryEndpoint(transport.source), segment(0, None)
    names = ("span-*", "patch-*")

    def files() -> int:
        return sum(len([*transport.path.glob(name)]) for name in names)

    for i in range(1, 101):
        passing = segment(i, None)
        handle = transport.add(Transfer(loads=(kept, passing)))
        assert endpoint.request_meta(handle) is not None
        del passing
        assert len(endpoint.parts(handle, 0, 10)) == 2, "a running request keeps its files"
        transport.remove(handle)
        assert files() == 2 and transport._bytes == sum(
            f.stat().st_size for name in names for f in transport.path.glob(name)
        )
        assert len(mapped(transport.path)) <= 8 and len(endpoint._requests.items()) <= 4
    first = {f.name for name in names for f in transport.path.glob(name)}
    again = replace(kept, span=replace(kept.span, k=kept.span.k.clone()))  # read from the store a second time
    transport.remove(transport.add(Transfer(loads=(again,))))
    assert files() == 2 and first != {f.name for name in names for f in transport.path.glob(name)}


def test_a_job_is_read_once(transport: SharedMemoryTransport) -> None:
    """vLLM's scheduler asks about a waiting request in every step, and when it has ended; gone is gone."""
    endpoint = SharedMemoryEndpoint(transport.source)
    transfer = Transfer(captures={"0": (0, 4)}, placeholder_tokens=3, private_from=2, min_load=4)
    handle = transport.add(transfer)
    with mock.patch.object(endpoints, "read_json", side_effect=endpoints.read_json) as reads:
        job = RequestMeta(**{part.name: getattr(transfer, part.name) for part in fields(RequestMeta)})
        assert [endpoint.request_meta(handle) for _ in range(5)] == [job] * 5
        assert reads.call_count == 1
        transport.remove(handle)
        assert endpoint.request_meta(handle) is None and handle not in endpoint._requests
        assert endpoint.request_meta(new_handle()) is None and endpoint.request_meta("../spec") is None
        assert reads.call_count == 1


def test_a_reserved_transfer_has_no_file_until_it_is_added(transport: SharedMemoryTransport) -> None:
    endpoint, handle = SharedMemoryEndpoint(transport.source), transport.reserve()
    assert endpoint.request_meta(handle) is None and is_reserved(handle) and not is_reserved(new_handle())
    endpoint.fail(handle, RuntimeError("of a client that has left"))
    assert endpoint.awaits(handle) and len(list(transport.path.glob(f"*{handle}*"))) == 1
    transfer = Transfer(captures={"0": (0, 4)})
    assert transport.add(transfer, handle) == handle and len(transport) == 1 and transfer.error is None
    meta = endpoint.request_meta(handle)
    assert meta is not None and meta.captures == {"0": (0, 4)}
    assert not endpoint.awaits(handle)
    transport.remove(handle)
    assert endpoint.request_meta(handle) is None and not list(transport.path.glob(f"*{handle}*"))
    transport.remove(never_added := transport.reserve())
    assert not endpoint.awaits(never_added) and not list(transport.path.glob(f"*{never_added}*"))


def test_a_full_disk_ends_no_request_but_its_own(transport: SharedMemoryTransport) -> None:
    """The scheduler reports in the middle of its step, where an exception would end vLLM."""
    endpoint = SharedMemoryEndpoint(transport.source)
    transfer = Transfer(captures={"0": (0, 4)}, placeholder_tokens=4)
    handle = transport.add(transfer)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(endpoints, "write_file", side_effect=full):
        endpoint.report_hit(handle, 0, 4)
        endpoint.fail(handle, RuntimeError("no such span"))
        with pytest.raises(OSError, match="No space"):  # caught, and told, by the connector
            endpoint.write_capture(handle, "0", {"k": torch.zeros(1, 4, 1, 4), "v": torch.zeros(1, 4, 1, 4)})
    transport.collect(handle, transfer, False)
    # Which its caller takes for a failed load.
    assert transfer.local_tokens + transfer.planned_tokens < transfer.placeholder_tokens
    transport.remove(handle)


def test_a_capture_that_never_comes_is_known_after_vllms_next_steps(transport: SharedMemoryTransport) -> None:
    """Nobody could say so, on a full disk for example: its steps bound the wait, and no time does."""
    transfer = Transfer(captures={"0": (0, 4), "1": (4, 6)})
    handle, steps = transport.add(transfer), list[int]()
    transport.step = lambda: steps.append(len(steps))
    transport.collect(handle, transfer, True)
    assert "without returning the KV of '0'" in str(transfer.error) and len(steps) == STEPS
    late = Transfer(captures={"0": (0, 5)})
    handle = transport.add(late)
    endpoint = SharedMemoryEndpoint(transport.source)
    kv = {"k": span(0).k, "v": span(0).v}
    transport.step = lambda: endpoint.write_capture(handle, "0", kv)  # by the step that was waited for
    transport.collect(handle, late, True)
    assert late.error is None and torch.equal(late.captured["0"][0], span(0).k)


def test_a_spool_of_another_container_is_not_swept(tmp_path: Path) -> None:
    """Containers may share ``/dev/shm`` and not their process numbers: what runs there does not run as seen from here."""
    used = SharedMemoryTransport(KV, tmp_path)
    with mock.patch.object(folders, "runs", return_value=False):
        other = SharedMemoryTransport(KV, tmp_path)
        assert (used.path / "spec.json").exists()
        with mock.patch("shutil.rmtree"):  # as where its process was killed
            used.close()
        assert folders.sweep(tmp_path) == [used.path.name]
        assert other.path.exists()
    other.close()
    assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_the_spool_to_its_parent(tmp_path: Path) -> None:
    transport = SharedMemoryTransport(KV, tmp_path)
    with mock.patch("os.getpid", return_value=os.getpid() + 1):
        transport.close()
    assert transport.path.exists()
