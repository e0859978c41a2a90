"""Where should a canonical be formed: behind the window's system prompt, or behind a neutral prefix that everybody shares?

``python -m evals.studies.canonical [--n 150]``. Behind the system prompt a chunk recalled to the front is exact and free; behind
a
neutral prefix one canonical serves every system prompt. The price of the latter is what the patch must carry on top.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from ctxwin import Chunk, open_engine
from ctxwin.engines.base import Encoded, Segment
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.tiny import world

SEED = 991_000_000  # items of its own
HEADER = "You watch a camera."
RANKS = (0, 4, 8, 11, 16)


@dataclass
class Cell:
    """KL to re-prefill and agreement of the greedy token, summed over items."""

    kl: float = 0.0
    agreed: int = 0
    n: int = 0


@dataclass
class Comparison:
    """Both kinds of canonical at every rank, on multi-hop items of 2 to 6 frames."""

    engine: HFEngine
    system_prompt: str = HEADER
    cells: dict[tuple[str, int], Cell] = field(default_factory=lambda: defaultdict(Cell))

    def run(self, n: int) -> None:
        """Adds ``n`` items. Cost: three forwards a frame and one read-out a cell."""
        system_prompt = self.engine.encode_system_prompt(self.system_prompt)
        prefixes = {"system_prompt": system_prompt, "neutral": self.engine.encode_system_prompt("")}
        for i in range(n):
            item = world.make_item(SEED + i, "multi_hop", 2 + i % 5)
            chunks = [
                self.engine.encode(Chunk.image(world.render(f), text=f"t={j} s")) for j, f in enumerate(item.frames)
            ]
            query = self.engine.encode_query(item.questions[0].text)
            exact = [Segment(system_prompt, 0, span=self.engine.prefill([], system_prompt, 0))]
            at = system_prompt.advance
            for chunk in chunks:
                exact.append(Segment(chunk, at, span=self.engine.prefill(exact, chunk, at)))
                at += chunk.advance
            reference = self.engine.logits(exact, query).log_softmax(-1)
            for kind, prefix in prefixes.items():
                self._item(kind, prefix, exact, query, reference)

    def _item(self, kind: str, prefix: Encoded, exact: list[Segment], query: Encoded, reference: torch.Tensor) -> None:
        kv = self.engine.spec.kv
        bases = [self.engine.prefill([Segment(prefix, 0)], p.encoded, prefix.advance) for p in exact[1:]]
        for rank in RANKS:
            segments = exact[:1]
            for segment, base in zip(exact[1:], bases, strict=True):
                assert segment.span is not None
                first = (
                    kind == "system_prompt" and len(segments) == 1
                )  # nothing but the system prompt in front: already exact
                span = base
                if rank and not first:
                    span = apply_patch(
                        base, form_patch(segment.span, base, kv, rank=rank, layers="deep"), kv, segment.start
                    )
                segments = [*segments, Segment(segment.encoded, segment.start, span=span)]
            served = self.engine.logits(segments, query).log_softmax(-1)
            cell = self.cells[kind, rank]
            cell.kl += float((reference.exp() * (reference - served)).sum())
            cell.agreed += int(served.argmax() == reference.argmax())
            cell.n += 1


def main() -> None:
    """Prints the comparison on the bundled model."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=150, help="items")
    options = parser.parse_args()
    with open_engine("tiny:hf", dtype="float32") as engine:
        assert isinstance(engine, HFEngine)
        comparison = Comparison(engine)
        comparison.run(options.n)
    table = Table("canonical behind", "rank", "KL", "agree", "n")
    for (kind, rank), cell in comparison.cells.items():
        table.add_row(kind, str(rank), f"{cell.kl / cell.n:.4f}", f"{cell.agreed / cell.n:.3f}", str(cell.n))
    Console().print(table)


if __name__ == "__main__":
    main()
