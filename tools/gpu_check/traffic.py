"""What moves at each edit, and how often: bytes and launches by a model of them, expected against seen.

``python tools/gpu_check/traffic.py DEVICE`` writes rows as JSON; ``gpu_check`` runs it so because on a processor the load kernel
runs under Triton's interpreter, which Triton decides when it is imported. The interpreter tells every byte that the kernel reads
and writes; on a GPU its time is held against these bytes at the rate of a copy within the device.

A window's chunks are loaded from the host, slide, slide again, and one that lost its copy is recalled. Then a forward waits for a
load, and KV is read back. Where vLLM is installed, its configuration says how far it schedules ahead, and what room layers that
slide would leave.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from shapes import DECODERS, Decoder, random_part
from timing import alternate

if TYPE_CHECKING:
    from ctxwin.kv.kernels import SpanSlice
    from ctxwin.kv.layout import KVSpec
    from ctxwin_vllm.paged import PagedKV

Row = dict[str, Any]
COSTS = {
    "kv": (1, "bytes of KV through the host"),
    "stalls": (2, "waits of vLLM's thread"),
    "awaited": (2, "layers that wait, each for its own write"),
    "others": (2, "waits of other forwards"),
    "ahead": (3, "steps scheduled ahead"),
    "copies": (4, "copies to the host"),
    "back": (4, "bytes to the host"),
    "launches": (5, "launches of the kernel"),
    "read": (5, "bytes that it reads"),
    "written": (5, "bytes that it writes"),
    "kernel_ms": (5, "its ms, a copy of these bytes"),
    "load_ms": (5, "ms of the load, a copy of these bytes"),
    "factors": (6, "bytes of patches' factors"),
    "spans": (7, "spans written for vLLM's processes"),
    "waits": (8, "waits for the disk"),
    "full": (9, "bytes of a request of 32,768 tokens"),
    "sliding": (9, "bytes if blocks behind a sliding window were dropped"),
    "tables": (10, "bytes of tables"),
    "angles": (10, "passes over the angles"),
}
"""What an edit spends beside the forward, each by the number of its row in `evals/results/gpu.md` and a name."""
SIZE, CHUNKS, RANK, BLOCK_TOKENS = 16, 4, 32, 16
"""Tokens of a paged block, chunks of the window, rank of their patches, tokens of one program of the kernel."""
LIMIT_S = 150
"""Seconds that the process may take."""


def traffic(device: torch.device, *, quick: bool) -> Iterator[Row]:
    """Yield the rows of a process of its own."""
    environment = {**os.environ, "CTXWIN_RESIDENT_BYTES": str(1 << 32)}
    environment |= {} if device.type == "cuda" else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, str(device), *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        yield {"edit": "all", "expected": {}, "seen": {}, "fault": f"not done after {LIMIT_S} s"}
        return
    yield from (json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row "))
    if done.returncode:
        fault = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        yield {"edit": "all", "expected": {}, "seen": {}, "fault": fault[0]}


def say(row: Row) -> str:
    """One line: what was seen, and in brackets what was expected where that is something else."""
    expected = row["expected"]
    counts = [
        f"{name[1]} {row['seen'][key]:.6g}" + f" ({expected[key]:.6g})" * (expected[key] != row["seen"][key])
        for key, name in COSTS.items()
        if key in expected
    ]
    return f"{row['edit']}: {row['fault'] or ', '.join(counts)}"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what the load path does within the context.

    ``launches`` of kernels; bytes of ``kv``, of patches' ``factors`` and of a load's ``tables`` that cross to the device; bytes
    that kernels have ``read`` and ``written``, where they are interpreted; passes over the ``angles`` of tokens. ``stalls`` are
    this thread's operations that wait for the device: torch's own list of them on a GPU, elsewhere copies that would wait there.
    """
    from triton.runtime import JITFunction, interpreter

    from ctxwin.kv import rope
    from ctxwin.kv.kernels import triton_kernel
    from ctxwin.kv.kernels.staging import Staging
    from ctxwin_vllm.resident import ResidentSpans

    counts: Counter[str] = Counter()
    me, gpu = threading.get_ident(), torch.cuda.is_available()

    def moved(_: torch.Tensor, *args: Any, **options: Any) -> None:
        names_device = any(isinstance(one, torch.device) for one in (*args, options.get("device")))
        waits = names_device and not options.get("non_blocking")
        counts["stalls"] += waits and not gpu and threading.get_ident() == me

    def warned(message: Any, *_: Any, **__: Any) -> None:
        counts["stalls"] += "synchronizing" in str(message) and threading.get_ident() == me

    def send(staging: Staging, count: int) -> None:
        if len(staging.tensors) == 5:  # of a load: two tables, keys, values, factors
            sizes = [tensor.nbytes for tensor in staging.tensors[:count]]
            counts.update(tables=sum(sizes[:2]), kv=sum(sizes[2:4]), factors=sum(sizes[4:]))

    def add(kind: str, pointers: Any, mask: Any) -> None:
        counts[kind] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def launch(*_: Any, **__: Any) -> None:
        counts["launches"] += 1

    watched: list[tuple[Any, str, Callable[..., None]]] = [
        (Staging, "send", send),
        (ResidentSpans, "_upload", lambda _, rows: counts.update(kv=rows.nbytes)),
        (rope, "angles", lambda *_: counts.update(angles=1)),
        (torch.Tensor, "to", moved),
        (torch, "tensor", moved),
    ]
    if triton_kernel.interpreted():
        builder = interpreter.InterpreterBuilder
        watched += [
            (interpreter.GridExecutor, "__call__", launch),
            (builder, "create_masked_load", lambda _, pointers, mask, *__: add("read", pointers, mask)),
            (builder, "create_masked_store", lambda _, pointers, value, mask, *__: add("written", pointers, mask)),
        ]
    else:
        watched.append((JITFunction, "run", launch))
    with ExitStack() as stack:
        for owner, name, count in watched:
            stack.enter_context(patch.object(owner, name, _counting(getattr(owner, name), count)))
        if gpu:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            stack.enter_context(patch.object(warnings, "showwarning", warned))
            stack.callback(torch.cuda.set_sync_debug_mode, 0)
            torch.cuda.set_sync_debug_mode("warn")
        yield counts


def _counting(plain: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        count(*args, **options)
        return plain(*args, **options)

    return called


def expected(spec: KVSpec, parts: Sequence[SpanSlice], resident: Sequence[bool]) -> dict[str, int]:
    """The model: what `counted` must find of one load, which reads on the device what is or becomes ``resident`` there."""
    tokens, heads, layers = sum(part.tokens for part in parts), spec.heads, spec.layers
    half, runs = spec.rope.rotary_dim // 2, -(-spec.v_dim // 64)
    rest, width = spec.k_dim - 2 * half, heads * (spec.k_dim + spec.v_dim)
    programs = sum(-(-part.tokens // BLOCK_TOKENS) for part in parts)
    # A program reads two numbers of its block, three of its layer and seven of its part; and a slot a token.
    read = spec.span_bytes(tokens) + layers * heads * (
        tokens * 2 * half * 4 + (1 + runs) * (programs * 96 + tokens * 8)
    )
    factors = 0
    for part in parts:
        rank, blocks = 0 if part.patch is None else part.patch.rank, -(-part.tokens // BLOCK_TOKENS)
        factors += 2 * layers * rank * (part.tokens + width)
        sides = 2 + (rest > 0) + runs  # a program of keys adds to both numbers of each pair
        read += 2 * layers * heads * rank * (sides * part.tokens + blocks * (spec.k_dim + spec.v_dim))
    crossing = sum(spec.span_bytes(part.tokens) for part, there in zip(parts, resident, strict=True) if not there)
    tables = layers * 8 * (3 + 7 * len(parts))
    model = {"kv": crossing, "stalls": 0, "launches": 1, "factors": factors, "tables": tables}
    return model | {"read": read, "written": spec.span_bytes(tokens), "angles": 2}  # of new places, and of stored ones


class _Attention:
    """A backend whose blocks hold ``[SIZE, heads, keys beside values]``."""

    def do_kv_cache_update(self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
        cache.transpose(1, 2)[slots // SIZE, slots % SIZE] = torch.cat([k, v], dim=-1)


def paged_cache(spec: KVSpec, device: torch.device, tokens: int) -> PagedKV:
    """A paged cache of vLLM's kind with room for ``tokens``, on the Triton kernel."""
    from ctxwin_vllm.paged import PagedKV

    shape, options = (-(-tokens // SIZE), SIZE, spec.heads, spec.k_dim + spec.v_dim), {"device": device}
    layers = {
        f"layers.{i}.attn": SimpleNamespace(
            kv_cache=torch.zeros(shape, dtype=getattr(torch, spec.dtype), **options).transpose(1, 2),
            impl=_Attention(),
            kv_cache_dtype="auto",
        )
        for i in range(spec.layers)
    }
    return PagedKV(layers, spec, SIZE, kernel="triton")


def edits(decoder: Decoder, device: torch.device, tokens: int) -> Iterator[Row]:
    """Yield the rows of loads into a paged cache, and of reading back."""
    spec = decoder.spec("bfloat16")
    paged = paged_cache(spec, device, (CHUNKS + 2) * tokens)
    assert paged.direct, "the kernel must write the paged cache"
    blocks = list(range(len(paged.layers[0].kv_cache)))

    def chunk(rank: int) -> SpanSlice:
        part = random_part(spec, tokens, rank, torch.device("cpu"))
        return replace(part, span=replace(part.span, start=0))

    def load(parts: Sequence[SpanSlice]) -> None:
        plan = paged.plan(parts, spec, None)
        paged.write(plan, paged.slots(blocks, 0, plan.tokens))

    def moved(parts: Sequence[SpanSlice], start: int) -> list[SpanSlice]:
        return [replace(part, start=start + i * tokens) for i, part in enumerate(parts)]

    for rank in (0, RANK):
        chunks = moved([chunk(rank) for _ in range(CHUNKS)], 7 + rank)
        survivors = moved(chunks[1:], 3 + rank)
        slid = [*survivors, chunk(rank)]
        recalled = [replace(chunk(rank), start=900 + rank), *survivors]
        for edit, parts, resident in (
            ("first ask", chunks, [False] * CHUNKS),
            ("slide", survivors, [True] * (CHUNKS - 1)),
            ("slide and append", slid, [True] * (CHUNKS - 1) + [False]),
            ("the same prompt again", slid, [True] * CHUNKS),
            ("reorder", moved(slid[::-1], 3 + rank), [True] * CHUNKS),
            (
                "fork and append, blocks gone",
                [*slid, replace(chunk(rank), start=500 + rank)],
                [True] * CHUNKS + [False],
            ),
            ("recall", recalled, [False] + [True] * (CHUNKS - 1)),
        ):
            with counted() as counts:
                load(parts)
            model = expected(spec, parts, resident)
            if edit == "the same prompt again":
                model["angles"] = 0
            if device.type == "cuda":  # which tells no bytes
                del model["read"], model["written"]
            yield _row(f"{edit}, rank {rank}", model, counts)
    if device.type == "cuda":
        yield from _timed(spec, device, load, survivors)


def _timed(
    spec: KVSpec, device: torch.device, load: Callable[[Sequence[SpanSlice]], None], parts: Any
) -> Iterator[Row]:
    """Time a slide of patched survivors against a copy of the bytes that it reads and writes."""
    from timing import busy

    model = expected(spec, parts, [True] * len(parts))
    source = torch.empty((model["read"] + model["written"]) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = alternate({"copy": lambda: target.copy_(source), "load": lambda: load(parts)}, device, 7)
    observed = {"kernel_ms": busy(lambda: load(parts)), "load_ms": times["load"]}
    yield {
        "edit": f"slide, rank {RANK}, timed",
        "expected": dict.fromkeys(observed, times["copy"]),
        "seen": observed,
        "fault": None,
    }


def forwards(decoder: Decoder, device: torch.device, tokens: int) -> Iterator[Row]:
    """Yield what forwards wait for: of the step of a load, of the next one, and beside a load in the background."""
    spec = decoder.spec("bfloat16")
    paged = paged_cache(spec, device, tokens)
    part, names = random_part(spec, tokens, 0, torch.device("cpu")), [f"layers.{i}.attn" for i in range(spec.layers)]
    waits: Counter[str] = Counter()

    def load(background: bool) -> None:
        with paged.loads.begin(background=background):
            paged.write(paged.plan([part], spec, None), paged.slots(range(-(-tokens // SIZE)), 0, tokens))

    def forward(kind: str) -> None:
        def waited(stream: Any, _: Any) -> None:
            waits[kind] += stream is not paged.loads.stream

        with patch.object(owner, "wait_event", _counting(owner.wait_event, waited)):
            for name in names:
                paged.loads.wait(name)
        if not paged.loads.finish():
            raise AssertionError("each layer's load must be waited for")

    owner = torch.cuda.Stream if device.type == "cuda" else torch.cpu.Stream
    load(background=False)
    forward("awaited")
    forward("others")
    load(background=True)
    forward("others")
    yield _row("forwards", {"awaited": spec.layers, "others": 0}, waits)


def read_back(decoder: Decoder, device: torch.device, tokens: int) -> Iterator[Row]:
    """Yield the rows of a chunk's way out of its blocks, to the caller's thread and to another process."""
    from ctxwin_vllm.transport import LocalTransport, SaveSpec, SharedMemoryTransport, Transfer, endpoint

    spec, begin = decoder.spec("bfloat16"), 3
    paged = paged_cache(spec, device, 2 * tokens)
    assert paged.reads_at_once, "the kernel must read the paged cache"
    blocks = tuple(range(len(paged.layers[0].kv_cache)))[::-1]
    programs = spec.layers * 2 * spec.heads
    size = spec.span_bytes(tokens)
    # A program reads its layer's address, and the number of each token's block.
    model = {"stalls": 0, "copies": 1, "back": size, "launches": 1, "written": size}
    model["read"] = size + programs * 8 * (-(-tokens // BLOCK_TOKENS) + tokens)
    if device.type == "cuda":
        del model["read"], model["written"]

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        local, shared = LocalTransport(spec), SharedMemoryTransport(spec, folder)
        other = endpoint.SharedMemoryEndpoint(shared.source)
        other.behind = True  # as on a GPU
        for transport, end in ((local, local), (shared, other)):
            stack.callback(transport.close)
            end.paged = paged
            transfer = Transfer(captures={"0": (begin, begin + tokens)})
            handle = transport.add(transfer)
            save = SaveSpec(transport.source, handle, "", blocks, {"0": (begin, begin + tokens)})
            reads: Counter[str] = Counter()

            def take(k: torch.Tensor, v: torch.Tensor, reads: Counter[str] = reads) -> None:
                beside = v.data_ptr() == k.data_ptr() + k.nbytes and k.is_contiguous() and v.is_contiguous()
                reads.update(back=k.nbytes + v.nbytes, copies=1 if beside else 2)

            stack.enter_context(patch.object(endpoint, "to_host", _counting(endpoint.to_host, take)))
            with counted() as counts:
                if end is local:
                    local.read_now(save, transfer)
                    local.read_ended()
                else:
                    other.save(save)
            other.flush()
            transport.collect(handle, transfer, True)
            if end is local:
                with paged.loads.reading(transfer.reads):
                    endpoint.to_host(*transfer.captured["0"])  # as `AskRunner.span_of` does in the caller's thread
            if transfer.error is not None:
                raise transfer.error
            yield _row("read back" + ", to the engine's process" * (end is other), model, counts + reads)
            transport.remove(handle)


def of_vllm() -> Iterator[Row]:
    """Yield what vLLM's own configuration says: steps scheduled ahead in each process mode, and the room of Gemma 3 (4B)."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from ctxwin.tiny import checkpoint_dir
    from ctxwin_vllm import internals
    from ctxwin_vllm.core import read_model
    from ctxwin_vllm.lifecycle import startup
    from ctxwin_vllm.transport import LocalTransport, SharedMemoryTransport

    folder = str(checkpoint_dir())
    kv = read_model(folder)[1]
    internals.import_model_classes(["Qwen2_5_VLForConditionalGeneration"])  # else vLLM starts a process to look at it
    configure = current_platform.check_and_update_config

    def configured(config: Any) -> None:
        ahead = config.scheduler_config.async_scheduling is not False  # vLLM's default, but on a CPU
        configure(config)
        config.scheduler_config.async_scheduling = ahead

    for mode in ("single", "multi"):  # and "async", which starts vLLM by the arguments of "multi"
        transport = LocalTransport(kv) if mode == "single" else SharedMemoryTransport(kv)
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(mode == "multi"))}
        with patch.dict(os.environ, environment), patch.object(current_platform, "check_and_update_config", configured):
            arguments = startup.with_connector(folder, {"dtype": kv.dtype}, transport)
            config = EngineArgs(model=folder, **arguments).create_engine_config()
        transport.close()
        yield _row(f"processes={mode!r}", {"ahead": 1}, Counter(ahead=config.max_concurrent_batches - 1))

    layers, every, window, length, in_flight = 34, 6, 1024, 32_768, 2048
    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "head_size": 256, "dtype": torch.bfloat16}
    specs: dict[str, Any] = {
        str(i): SlidingWindowSpec(**shape, sliding_window=window) if i % every else FullAttentionSpec(**shape)
        for i in range(1, layers + 1)
    }
    limits: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=in_flight,
    )
    token, whole = 2 * 2 * 4 * 256, layers // every
    observed = Counter(sliding=sum(spec.max_memory_usage_bytes(limits) for spec in specs.values()))
    unify_hybrid_kv_cache_specs(specs)  # as `disable_hybrid_kv_cache_manager` has it
    observed["full"] = sum(spec.max_memory_usage_bytes(limits) for spec in specs.values())
    blocks = -(-(window - 1 + in_flight) // 16) + 1
    model = {"full": layers * length * token, "sliding": (whole * length + (layers - whole) * blocks * 16) * token}
    yield _row("Gemma 3 (4B)", model, observed)


def behind_answers(decoder: Decoder, tokens: int) -> Iterator[Row]:
    """Yield the rows of KV on its way to vLLM's processes and to a store, at a first ask and at a slide of the same chunks."""
    from ctxwin import open_store
    from ctxwin.engines.segments import Encoded, Segment
    from ctxwin.hashing import digest
    from ctxwin.store.spans import SpanRepository
    from ctxwin_vllm.transport import SharedMemoryTransport, Transfer, shared_memory

    spec = decoder.spec("bfloat16")
    spans = [random_part(spec, tokens, 0, torch.device("cpu")).span for _ in range(CHUNKS)]
    segments = [
        Segment(Encoded(str(i), (0,) * tokens, span.positions.numpy(), tokens), i * tokens, span, span_key=str(i))
        for i, span in enumerate(spans)
    ]
    counts: Counter[str] = Counter()
    me = threading.get_ident()

    def written(path: Path, *data: Any) -> None:
        counts["spans"] += path.name.startswith("span-")

    def synced(_: int) -> None:
        counts["waits" if threading.get_ident() == me else "behind"] += 1

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.object(shared_memory, "write_file", _counting(shared_memory.write_file, written)))
        transport = SharedMemoryTransport(spec, folder)
        stack.callback(transport.close)
        for edit, loads, files in (("first ask", segments, CHUNKS), ("slide", segments[1:], 0)):
            counts.clear()
            transport.remove(transport.add(Transfer(loads=tuple(replace(one, start=one.start) for one in loads))))
            yield _row(f"{edit}, to vLLM's processes", {"spans": files}, counts)
        store = open_store(f"disk:{folder / 'kv'}")
        stack.callback(store.close)
        repository = SpanRepository(store, "checked", spec=spec, behind=True)
        stack.enter_context(patch.object(os, "fsync", _counting(os.fsync, synced)))
        for i, span in enumerate(spans):
            repository.put_span(digest(i), span, {"token_ids": [0] * tokens})
        repository.flush()
        yield _row("first ask, to a store", {"waits": 0}, counts)
        if counts["behind"] < CHUNKS:
            raise AssertionError(f"{CHUNKS} spans must be on the disk, got {counts['behind']} writes")


def _row(edit: str, model: dict[str, int], counts: Counter[str]) -> Row:
    observed = {name: counts[name] for name in model}
    wrong = [
        f"{COSTS[name][1]} {observed[name]}, expected {model[name]}" for name in model if observed[name] != model[name]
    ]
    return {"edit": edit, "expected": model, "seen": observed, "fault": "; ".join(wrong) or None}


def main(device: torch.device, *, quick: bool) -> None:
    """Write all rows, each in a line behind ``row``."""
    small = quick or device.type != "cuda"
    decoder, tokens = (DECODERS[0].smaller(), 24) if small else (DECODERS[0], 256)
    parts = [edits(decoder, device, tokens), forwards(decoder, device, tokens), read_back(decoder, device, tokens)]
    parts += [behind_answers(decoder, tokens), *([of_vllm()] if importlib.util.find_spec("vllm") else [])]
    for rows in parts:
        for row in rows:
            sys.stdout.write(f"row {json.dumps(row)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), quick="--quick" in sys.argv)
