"""Stage outputs on vLLM: tensors with a row for each slot of the paged cache, filled beside it.

A forward of vLLM's model runner writes its tokens' KV into slots; a hook on the model writes what it returns into rows of the
same numbers, as vLLM-Omni does ("Automatic Prefix Caching in Omni Models"). Whatever finds a block in the prefix cache finds
its rows, loads and captures treat both alike, and a block's partial tail is like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ctxwin.engines.outputs import joined, rows_of
from ctxwin.kv.kernels import Part


class StageOutputs:
    """Of one model that runs in this process.

    Args:
        model: what vLLM's runner calls; returns hidden states, or tensors with names.
        slots: of the paged cache. Memory: a row for each slot and output, from the first forward on.
    """

    def __init__(self, model: torch.nn.Module, slots: int) -> None:
        self._slots = slots
        self._rows: dict[str, torch.Tensor] = {}
        self._hook = model.register_forward_hook(self._hear)

    def close(self) -> None:
        """Listens no more."""
        self._hook.remove()
        self._rows.clear()

    def _hear(self, model: Any, args: Any, output: Any) -> None:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        if not is_forward_context_available():
            return
        mapping = get_forward_context().slot_mapping
        found = next(iter(mapping.values()), None) if isinstance(mapping, dict) else None
        if found is None:
            return  # a warm-up
        here = found >= 0  # rows that pad a batch have no slot
        for name, rows in rows_of(output, len(found)).items():
            self._of(name, rows)[found[here]] = rows[here]

    def _of(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if name not in self._rows:
            self._rows[name] = rows.new_zeros((self._slots, *rows.shape[1:]))
        return self._rows[name]

    def write(self, parts: Sequence[Part], slots: torch.Tensor) -> None:
        """Puts the rows of loaded spans beside their KV."""
        found = joined([{n: rows[p.begin : p.stop] for n, rows in p.span.outputs.items()} for p in parts])
        for name, rows in found.items():
            kept = self._of(name, rows)
            kept[slots.to(kept.device)] = rows.to(kept.device, kept.dtype)

    def read(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows of these slots, on the CPU."""
        return {name: rows[slots.to(rows.device)].to("cpu") for name, rows in self._rows.items()}
