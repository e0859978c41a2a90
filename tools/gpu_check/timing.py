"""Timings of loads against a copy of the same bytes, and against computing the same tokens again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shapes import Decoder, random_part

from ctxwin.kv.kernels.api import LoadPlan
from ctxwin.kv.kernels.staging import to_host
from ctxwin.kv.layout import KVSpec
from ctxwin_vllm.resident import ResidentSpans

Row = dict[str, Any]
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
RANKS = (0, 16, 32, 64)
QUERY = 16
"""Tokens of the question after the chunk, which are computed in any case."""
FAR = 777
"""Original position of the chunk: a load rotates its keys by this many positions."""


def bandwidth(decoder: Decoder, device: torch.device, lengths: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """One row for each length and rank: a load of all layers and the copy of its bytes, run in turn.

    ``load_ms`` begins with spans in the host's memory and ends with KV on the device, ``resident_ms`` is the same with spans that
    an earlier load has left on the device, ``plan_ms`` is the part of it before
    the first layer, ``copy_ms`` a copy of as many bytes from page-locked memory and ``pageable_ms`` one from a span's.
    ``kernel_ms`` is the time the device itself was busy with the load kernel (GPUs only, by torch's profiler),
    ``device_copy_ms`` a copy of as many bytes within the device, and ``expected_ms`` the bytes that the kernel must move
    (`kernel_bytes`) at that copy's rate. ``back_ms`` gathers as many bytes out of a paged cache in shuffled order, onto the
    host.
    """
    spec = decoder.spec("bfloat16")
    for tokens in lengths if rounds else ():
        size = spec.span_bytes(tokens)
        host = torch.empty(size // 2, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
        target = torch.empty_like(host, device=device)
        copy = torch.empty_like(target)
        pageable = torch.empty(size // 2, dtype=torch.bfloat16)
        slots = torch.randperm(tokens, device=device)
        for rank in RANKS:
            part = random_part(spec, tokens, rank, torch.device("cpu"), FAR)

            copies = ResidentSpans(device, range(spec.layers), 1 << 40)

            def load(part: Any = part, copies: ResidentSpans | None = None) -> None:
                parts = [part] if copies is None else copies.attach([part])
                plan = LoadPlan(parts, spec, dtype=torch.bfloat16, device=device)
                for i in range(plan.layers):
                    plan.layer(i)

            moves: dict[str, Callable[[], object]] = {
                "load_ms": load,
                "resident_ms": lambda load=load, copies=copies: load(copies=copies),
                "plan_ms": lambda part=part: LoadPlan([part], spec, dtype=torch.bfloat16, device=device),
                "copy_ms": lambda host=host, target=target: target.copy_(host, non_blocking=True),
                "pageable_ms": lambda pageable=pageable, target=target: target.copy_(pageable),
                "back_ms": lambda target=target, slots=slots, tokens=tokens: to_host(
                    *target.view(2, -1, tokens).index_select(2, slots).unbind()
                ),
                "device_copy_ms": lambda target=target, copy=copy: copy.copy_(target),
            }
            row: Row = {"decoder": decoder.name, "tokens": tokens, "rank": rank, "megabytes": size / 1e6}
            row["kernel_megabytes"] = kernel_bytes(spec, tokens, rank) / 1e6
            row |= alternate(moves, device, rounds)
            row["expected_ms"] = row["device_copy_ms"] * kernel_bytes(spec, tokens, rank) / (2 * size)
            row["kernel"] = LoadPlan([part], spec, dtype=torch.bfloat16, device=device).kernel
            if device.type == "cuda":
                row["kernel_ms"] = busy(load)
                row["kernel_gb_per_s"] = 2 * size / 1e6 / row["kernel_ms"] if row["kernel_ms"] else None
                row["device_copy_gb_per_s"] = 2 * size / 1e6 / row["device_copy_ms"]
            yield row


def kernel_bytes(spec: KVSpec, tokens: int, rank: int) -> int:
    """Bytes that a load of all layers must move within the device: KV read and written, a patch's factors, and the angles.

    A program reads the right factor of its columns again for every 16 tokens; the device's cache serves that.
    """
    factors = rank * (tokens + spec.heads * (spec.k_dim + spec.v_dim)) * 2 if rank else 0
    angles = tokens * spec.rope.rotary_dim * 4
    return 2 * spec.span_bytes(tokens) + spec.layers * (factors + angles)


def break_even(
    decoder: Decoder, device: torch.device, lengths: tuple[int, ...], rounds: int, layers: int, dtype: str
) -> Iterator[Row]:
    """One row for each length: first token with a chunk loaded, with it loaded and patched, and with it computed again.

    The transformers engine on random weights of the decoder's shape, cut to ``layers`` layers. ``away`` is the distance of
    the logits with the chunk loaded from those with it computed again, relative to their length.
    """
    from ctxwin.engines.segments import Segment
    from ctxwin.kv.patch import form_patch

    engine = _engine(decoder, device, layers, dtype)
    spec, layer_count = engine.spec.kv, min(layers, decoder.layers)
    query = engine.encode(_words(QUERY, 1))
    first = engine.encode(_words(QUERY, 2))
    for tokens in lengths:
        if tokens + FAR + 3 * QUERY > engine.spec.max_tokens:
            break
        chunk = engine.encode(_words(tokens, 3))
        span = engine.prefill([], chunk, FAR)
        row: Row = {"decoder": decoder.name, "tokens": tokens, "layers": layer_count, "of_layers": decoder.layers}
        loaded = engine.logits([Segment(chunk, 0, span)], query)
        computed = engine.logits([Segment(chunk, 0)], query)
        row["away"] = float((loaded - computed).norm() / computed.norm())
        moves: dict[str, Callable[[], object]] = {
            "computed_ms": lambda chunk=chunk: engine.logits([Segment(chunk, 0)], query),
            "loaded_ms": lambda chunk=chunk, span=span: engine.logits([Segment(chunk, 0, span)], query),
            "captured_ms": lambda chunk=chunk: engine.prefill([], chunk, 0),
        }
        if tokens <= 1024:  # forming a patch takes an SVD of the chunk
            conditioned = engine.prefill([Segment(first, 0)], chunk, QUERY)
            patch = form_patch(conditioned, span, spec, rank=32)
            moves["patched_ms"] = lambda chunk=chunk, span=span, patch=patch: engine.logits(
                [Segment(chunk, 0, span, patch)], query
            )
        yield row | alternate(moves, device, rounds)
    engine.close()


def scans(
    decoder: Decoder, device: torch.device, lengths: tuple[int, ...], rounds: int, layers: int, dtype: str
) -> Iterator[Row]:
    """One row for each length of a hybrid's chunk after another: first token with it computed, and with its states composed.

    ``composed_ms`` moves it by its map on the recurrent states (`ctxwin.kv.states`), ``loaded_ms`` takes the states that were
    captured after the same prefix, and ``captured_ms`` computes and captures them.
    ``away`` is the distance of the logits with the chunk composed from those with it computed, relative to their length, and
    ``without`` that of the chunk alone: the effect of the preceding states.
    """
    from ctxwin.engines.segments import Segment

    engine = _engine(decoder, device, layers, dtype, position_free=True)
    layer_count, query, prefix = (
        min(layers, decoder.layers),
        engine.encode(_words(QUERY, 1)),
        engine.encode(_words(FAR, 2)),
    )
    preceding = Segment(prefix, 0, engine.prefill([], prefix, 0))
    for tokens in lengths:
        if tokens + FAR + 3 * QUERY > engine.spec.max_tokens:
            break
        chunk = engine.encode(_words(tokens, 3))
        bare = Segment(chunk, prefix.advance)
        span = engine.prefill([preceding], chunk, prefix.advance)
        exact, moved = (Segment(chunk, prefix.advance, span, approximate=flag) for flag in (False, True))
        row: Row = {"decoder": decoder.name, "tokens": tokens, "layers": layer_count, "of_layers": decoder.layers}
        row |= {"kv_bytes": tokens * engine.spec.kv.token_bytes, "state_bytes": engine.spec.kv.state_bytes}
        computed = engine.logits([preceding, bare], query)
        row["away"] = float((engine.logits([preceding, moved], query) - computed).norm() / computed.norm())
        row["without"] = float((engine.logits([moved], query) - computed).norm() / computed.norm())
        moves: dict[str, Callable[[], object]] = {
            "computed_ms": lambda bare=bare: engine.logits([preceding, bare], query),
            "composed_ms": lambda moved=moved: engine.logits([preceding, moved], query),
            "loaded_ms": lambda exact=exact: engine.logits([preceding, exact], query),
            "captured_ms": lambda chunk=chunk: engine.prefill([preceding], chunk, prefix.advance),
        }
        yield row | alternate(moves, device, rounds)
    engine.close()


def _engine(decoder: Decoder, device: torch.device, layers: int, dtype: str, **options: Any) -> Any:
    from ctxwin.engines.hf.engine import HFEngine

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        write_model(decoder, Path(folder), layers, dtype, device)
        return HFEngine(Path(folder), device=str(device), dtype=dtype, **options)


def write_model(decoder: Decoder, folder: Path, layers: int, dtype: str, device: torch.device) -> None:
    """Write a model folder: random weights, the same in every run on a device, and the bundled model's tokenizer."""
    import transformers

    from ctxwin.tiny import checkpoint_dir

    config = decoder.make_config(layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # recurrent states that last, as trained ones do
            parameter.data.uniform_(0.005, 0.1, generator=generator).log_()
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.02, generator=generator)
        else:
            torch.nn.init.constant_(parameter, float(not name.endswith("bias")))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(checkpoint_dir()).save_pretrained(folder)


def alternate(moves: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each; all run once per round, so that disturbances affect all; one round warms up.

    With no rounds nothing is run.
    """
    if not rounds:
        return {}
    times: dict[str, list[float]] = {name: [] for name in moves}
    for warm in [True, *[False] * rounds]:
        for name, move in moves.items():
            synchronize(device)
            began = time.perf_counter()
            move()
            synchronize(device)
            if not warm:
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: median(samples) for name, samples in times.items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy(load: Callable[[], object]) -> float:
    """Return the milliseconds that the load kernel kept the device busy."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        load()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profiler.key_averages() if "load_layers" in e.key) / 1e3


def _words(tokens: int, seed: int) -> Any:
    from ctxwin import Chunk

    ids = torch.randint(100, 900, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Chunk.tokens([int(i) for i in ids])


def usable(spec: KVSpec, lengths: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    """The lengths whose KV fits a quarter of the device's free memory (of 2 GB on the processor)."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2 << 30
    return tuple(n for n in lengths if spec.span_bytes(n) <= free // 4)
