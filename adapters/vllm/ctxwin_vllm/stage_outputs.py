"""Stage outputs on vLLM: tensors with a row for each slot of the paged cache.

A forward of vLLM's model runner writes its tokens' KV into slots; a hook on the model writes its outputs into the rows of the
same numbers, as vLLM-Omni does ("Automatic Prefix Caching in Omni Models"). So a hit in the prefix cache finds the rows of its
blocks, loads and captures treat both alike, and a block's partial tail needs no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ctxwin.engines.outputs import concat_outputs, rows_of
from ctxwin.kv.kernels import SpanSlice


class StageOutputs:
    """Stage outputs of one model that runs in this process.

    Args:
        model: the module that vLLM's runner calls; returns hidden states, or tensors with names.
        slots: of the paged cache. Memory: a row for each slot and output, from the first forward on.
    """

    def __init__(self, model: torch.nn.Module, slots: int) -> None:
        self._slots = slots
        self._rows: dict[str, torch.Tensor] = {}
        self._hook = model.register_forward_hook(self._store)

    def close(self) -> None:
        """Remove the hook and drop the rows."""
        self._hook.remove()
        self._rows.clear()

    def _store(self, model: Any, args: Any, output: Any) -> None:
        slots = _slots()
        if slots is None:
            return
        used = slots >= 0  # rows that pad a batch have no slot
        for name, rows in rows_of(output, len(slots)).items():
            self._table(name, rows)[slots[used]] = rows[used]

    def _table(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if name not in self._rows:
            self._rows[name] = rows.new_zeros((self._slots, *rows.shape[1:]))
        return self._rows[name]

    def write(self, parts: Sequence[SpanSlice], slots: torch.Tensor) -> None:
        """Write the rows of loaded spans into these slots."""
        outputs = concat_outputs([{n: rows[p.begin : p.stop] for n, rows in p.span.outputs.items()} for p in parts])
        for name, rows in outputs.items():
            table = self._table(name, rows)
            table[slots.to(table.device)] = rows.to(table.device, table.dtype)

    def read(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows of these slots, on the CPU."""
        return {name: rows[slots.to(rows.device)].to("cpu") for name, rows in self._rows.items()}


class Queries:
    """Rotated queries of all layers, captured while the context is entered: vLLM keeps keys and values only.

    `ctxwin.kv.merge` weighs slots by them. Memory: the queries of all tokens computed meanwhile.

    Args:
        layers: attention layers in order, of a model that runs in this process.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._queries: list[dict[int, torch.Tensor]] = [{} for _ in layers]
        self._plain = [layer.impl.forward for layer in layers]

    def __enter__(self) -> Queries:
        for index, (layer, plain) in enumerate(zip(self._layers, self._plain, strict=True)):
            layer.impl.forward = self._hooked(index, plain)
        return self

    def __exit__(self, *exc: object) -> None:
        for layer in self._layers:
            del layer.impl.forward  # its class has one

    def _hooked(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
            slots = _slots()
            if slots is not None:
                rows = query[: len(slots)].detach().clone()
                self._queries[index].update(zip(slots.tolist(), rows, strict=False))
            return plain(layer, query, *args, **options)

        return forward

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the queries of the tokens in these slots, ``[T, L, H, D]`` on the CPU.

        Raises KeyError for a token that was not computed.
        """
        layers = [torch.stack([queries[slot] for slot in slots.tolist()]) for queries in self._queries]
        return torch.stack(layers, dim=1).to("cpu")


def _slots() -> torch.Tensor | None:
    """Return the slot of each token of the running forward, -1 for padding; None in a warm-up."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    mapping = get_forward_context().slot_mapping
    return next(iter(mapping.values()), None) if isinstance(mapping, dict) else None
