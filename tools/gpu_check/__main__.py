"""Does ctxwin work on this GPU, and how fast? ``make gpu-check``, or ``python tools/gpu_check --help``.

Needs torch, Triton, transformers and what ``import ctxwin`` needs; no network. Six sections, each as far as the time goes:
load kernels against float64; bytes and launches of each edit against a model of them; where vLLM is installed, windows on the
embedded engine and what a slide costs there; loads against copies; first tokens with chunks loaded or computed again; and the
same for a hybrid's chunks, whose recurrent states are composed.
Writes ``gpu-check.json`` and ``gpu-check.png``. Exit status 1 where a number is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from correct import check_all
from engine import engines
from figure import draw
from shapes import DECODERS, HYBRID
from timing import LENGTHS, bandwidth, break_even, scans, usable
from traffic import say, traffic

Row = dict[str, Any]
BOUNDS = {"bfloat16": 0.1, "float32": 1e-3}
"""How far logits behind a loaded chunk may be from those behind the same chunk computed again, relative to their length. In
bfloat16 a rounding can send a token to other experts; on tiny decoders it was 0.005."""


SECTIONS = ("correct", "traffic", "engines", "bandwidth", "break_even", "scans")


class Clock:
    """How much of the time is left, and lines of progress on stderr."""

    def __init__(self, minutes: float) -> None:
        self._begun, self._end = time.monotonic(), time.monotonic() + 60 * minutes

    def tell(self, line: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._begun:4.0f} s] {line}", file=sys.stderr, flush=True)

    def take(self, name: str, rows: Iterable[Row], share: float, say: Callable[[Row], str]) -> tuple[list[Row], bool]:
        """Return rows until they end or ``share`` of the remaining time is used up, and True if they ended."""
        until = time.monotonic() + share * (self._end - time.monotonic())
        taken_rows: list[Row] = []
        for row in rows:
            taken_rows.append(row)
            self.tell(f"{name}: {say(row)}")
            if time.monotonic() > until:
                self.tell(f"{name}: stopped after {len(taken_rows)} rows, the time is used up")
                return taken_rows, False
        return taken_rows, True


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    parser.add_argument(
        "--minutes", type=float, help="time for everything (default 8; with --quick until everything is done)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny decoders and few lengths, a minute on a processor")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="these sections only; may be given again")
    parser.add_argument("--compare", action="store_true", help="compare only, and time nothing")
    parser.add_argument("--layers", type=int, default=8, help="layers of the decoders that are run whole (default 8)")
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="folder of a text model for vLLM; may be given again"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results (default gpu-check)")
    options = parser.parse_args()
    # The little that --quick does is done whole, so that a busy machine leaves out nothing.
    minutes = options.minutes if options.minutes is not None else math.inf if options.quick else 8.0
    device, clock = torch.device(options.device), Clock(minutes)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": _machine(device), "quick": options.quick, "complete": {}}
    clock.tell(f"{result['machine']['device']}, torch {torch.__version__}")

    wanted = options.only or [name for name in SECTIONS if name != "engines" or not options.quick]
    if importlib.util.find_spec("vllm") is None and "engines" in wanted:
        clock.tell("engines: vLLM is not installed, so it is not tested")
        wanted = [name for name in wanted if name != "engines"]
    for name, found, share, tell in (
        ("correct", check_all(device, quick=options.quick), 0.4, _say_correct),
        ("traffic", traffic(device, quick=options.quick), 0.2, say),
        ("engines", engines(device, quick=options.quick, models=options.model), 0.7, _say_engine),
    ):
        if name in wanted:
            result[name], result["complete"][name] = clock.take(name, found, share, tell)

    decoders = [d.smaller() for d in DECODERS] if options.quick else list(DECODERS)
    lengths, rounds = (LENGTHS[:3], 3) if options.quick else (LENGTHS, 7)
    rounds = 0 if options.compare else rounds
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    hybrid = HYBRID.smaller() if options.quick else HYBRID
    for name, run, share, shapes in (
        ("bandwidth", lambda d, n: bandwidth(d, device, n, rounds), 0.4, decoders),
        ("break_even", lambda d, n: break_even(d, device, n, rounds, options.layers, dtype), 0.7, decoders),
        ("scans", lambda d, n: scans(d, device, n, rounds, options.layers, dtype), 1.0, [hybrid]),
    ):
        if name not in wanted:
            continue
        result[name], whole = [], True
        for i, decoder in enumerate(shapes):
            fits = usable(decoder.spec("bfloat16"), lengths, device)
            rows, ended = clock.take(name, run(decoder, fits), share / (len(shapes) - i), _say_time)
            result[name] += rows
            whole = whole and ended and fits == lengths
        result["complete"][name] = whole
        _write(options.out, result)
    _write(options.out, result)
    timed = [row for name in ("bandwidth", "break_even", "scans") for row in result.get(name, ())]
    if rounds and timed:
        draw(result, options.out / "gpu-check.png")
    compared = [row for name in ("correct", "traffic", "engines") for row in result.get(name, ())]
    wrong = [row for row in compared if row["fault"]]
    wrong += [row for row in timed if not row.get("away", 0.0) <= BOUNDS[dtype]]
    for row in wrong:
        print(f"wrong: {row}", file=sys.stderr)
    compared_rows = f"{len(compared)} comparisons, {len(wrong)} wrong"
    pictured = " and gpu-check.png" * bool(rounds and timed)
    print(f"{compared_rows}; {options.out / 'gpu-check.json'}{pictured} written")
    return 1 if wrong else 0


def _machine(device: torch.device) -> dict[str, Any]:
    import transformers

    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"memory_gib": properties.total_memory / 2**30, "multiprocessors": properties.multi_processor_count}
        facts |= {"cuda": torch.version.cuda, "capability": list(torch.cuda.get_device_capability(device))}
    return facts


def _say_correct(row: Row) -> str:
    where = f"{row['layout']}, {row['dtype']}, {row['kernel']}, tokens {row['tokens']}"
    return f"{where}: {row['fault'] or 'right'}"


def _say_engine(row: Row) -> str:
    where = ", ".join(row[key] for key in ("model", "engine", "program") if key in row)
    if row["fault"] or "asks" not in row:
        return f"{where}: {row['fault'] or _times(row)}"
    return f"{where}: {row['equal']} of {row['compared']} answers equal, {row['away']:.2g} away, kernel {row['kernel']}"


def _say_time(row: Row) -> str:
    rank = f", rank {row['rank']}" if "rank" in row else ""
    return f"{row['decoder']}, {row['tokens']} tokens{rank}: {_times(row)}"


def _times(row: Row) -> str:
    return ", ".join(f"{name[:-3]} {value:.2f} ms" for name, value in row.items() if name.endswith("_ms") and value)


def _write(folder: Path, result: dict[str, Any]) -> None:
    (folder / "gpu-check.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
