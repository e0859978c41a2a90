"""Runs every example on the bundled model, one after the other, and prints a table of computed tokens and right answers.

Shares are of what users of a prefix cache compute, and of the best of them; ``equal``: answers that a re-prefill gives, too.
Each runs in a process of its own, for the seeds 0 to N-1. Exit code 1 if one failed; the web example is skipped if there is
no Chromium.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from web.browser import find_chromium

EXAMPLES = ("video_agent", "web_agent", "document_agent", "visual_search", "two_agents", "library_agent", "custom_loop")
POLICIES = ("naive", "trim", "append")  # uses of a prefix cache, see `ctxwin.baselines.ledger`
SUMS = (
    "asks", "known", "right", "right_reprefill", "compared", "agree", "seconds",
    *(cost + user for cost in ("computed_tokens", "vision_encodes") for user in ("", *(f"_{p}" for p in POLICIES))),
)  # fmt: skip
USERS = (*POLICIES, "best")
COLUMNS = (
    "example", "asks", "right", "re-prefill", "tokens", *(f"of {user}" for user in USERS), "equal", "encodes", "theirs", "s",
)  # fmt: skip
LAST_LINES = 15
LIMIT_S = 600  # for one run


class FailedError(Exception):
    """An example failed; the message holds its last lines."""


def run(folder: Path, name: str, seed: int, options: list[str]) -> dict[str, Any]:
    """Run one example and return its figures, with its duration."""
    command = [sys.executable, str(folder / f"{name}.py"), "--json", "--seed", str(seed)]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command + options, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise FailedError(f"{name} failed with seed {seed}: it took longer than {LIMIT_S} s") from None
    seconds = time.perf_counter() - begin
    if done.returncode == 0:
        try:
            figures = {**json.loads(done.stdout.strip().splitlines()[-1]), "seconds": seconds}
            if not set(SUMS) - figures.keys():
                return figures
        except (ValueError, IndexError):
            pass  # its last line is not its figures
    output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:])
    raise FailedError(f"{name} failed with seed {seed} (exit code {done.returncode}):\n{output}")


def pool(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all seeds."""
    row: dict[str, Any] = {"example": name, "seeds": [figures["seed"] for figures in runs], "engine": runs[0]["engine"]}
    row |= {key: sum(figures[key] for figures in runs) for key in SUMS}
    row |= {f"share_of_{p}": row["computed_tokens"] / row[f"computed_tokens_{p}"] for p in POLICIES}
    row["share_of_best"] = max(row[f"share_of_{p}"] for p in POLICIES)
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a table row; seconds are those of one run, including the engine's start."""
    with_truth = row["known"]
    return [
        row["example"],
        str(row["asks"]),
        f"{row['right']}/{with_truth}",
        f"{row['right_reprefill']}/{with_truth}",
        f"{row['computed_tokens']:,}",
        *(f"{100 * row[f'share_of_{user}']:.1f} %" for user in USERS),
        f"{row['agree']}/{row['compared']}",
        str(row["vision_encodes"]),
        str(min(row[f"vision_encodes_{p}"] for p in POLICIES)),
        f"{row['seconds'] / len(row['seeds']):.0f}",
    ]


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)], *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "example" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=EXAMPLES, default=EXAMPLES, help=", ".join(EXAMPLES)
    )
    parser.add_argument("--engine", choices=("hf", "vllm"), help="default: vLLM where it is installed")
    parser.add_argument("--mode", choices=("auto", "exact"), default="auto", help="fidelity; default: the profile's")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each example; default: %(default)s")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the figures as JSON")
    output.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")

    passed = ["--mode", options.mode, *(["--engine", options.engine] if options.engine else [])]
    rows, skipped, failed = [], {}, {}
    for name in options.only:
        try:
            if name == "web_agent":
                find_chromium()
            runs = []
            for seed in range(options.seeds):
                runs.append(run(Path(__file__).parent, name, seed, passed))
                print(f"{name}, seed {seed}: {runs[-1]['seconds']:.1f} s", file=sys.stderr)
            rows.append(pool(name, runs))
        except SystemExit as missing:
            skipped[name] = str(missing)
            print(f"{name} is skipped: {missing}", file=sys.stderr)
        except FailedError as error:
            failed[name] = str(error)
            print(error, file=sys.stderr)

    if options.json:
        print(json.dumps({"examples": rows, "skipped": skipped, "failed": failed}, indent=1))
    elif options.markdown:
        print(markdown(rows))
    else:
        Console(width=128).print(text(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
