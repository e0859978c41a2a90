"""Stage outputs on vLLM: tensors with a row for each slot of the paged cache.

A forward of vLLM's model runner writes its tokens' KV into slots; what the runner hands from there to sampling is written into
the rows of the same numbers, as vLLM-Omni does ("Automatic Prefix Caching in Omni Models"). So a hit in the prefix cache finds
the rows of its blocks, loads and captures treat both alike, and a block's partial tail needs no special case. It is the same
in every mode, because nothing is taken from within the model, whose Python neither a compiled nor a recorded graph runs: the
last hidden states, and auxiliary ones where the runner has them. Other tensors of vLLM's models never leave its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ctxwin.engines.outputs import HIDDEN, concat_outputs, rows_of
from ctxwin.errors import EngineFailed
from ctxwin.kv.kernels import SpanSlice
from ctxwin.kv.kernels.staging import to_device
from ctxwin.kv.merge import attention_sums
from ctxwin_vllm.internals import observe_forwards
from ctxwin_vllm.paged import PagedKV

NOT_COMPUTED = "what is merged by its attention must be computed in one piece, without Fidelity(recompute=)"


class StageOutputs:
    """Stage outputs of the model in one worker.

    Args:
        runner: vLLM's model runner.
        paged: the worker's cache. Memory: a row for each of its slots and each output, on the model's device.

    Raises EngineFailed where the device has no room for the hidden states.
    """

    def __init__(self, runner: Any, paged: PagedKV) -> None:
        self._layer: str = paged.layers[0].layer_name
        # One row more than slots: -1 is the slot of rows that pad a batch, and no copy to the host has to sort them out.
        self._count = int(paged.layers[0].kv_cache.shape[0]) * paged.block_size + 1
        config = runner.model_config
        width, options = int(config.get_hidden_size()), {"dtype": config.dtype, "device": runner.device}
        try:
            self._rows: dict[str, torch.Tensor] = {HIDDEN: torch.zeros(self._count, width, **options)}
        except torch.OutOfMemoryError as error:
            size = self._count * width * config.dtype.itemsize >> 20
            raise EngineFailed(
                f"outputs=True needs {size} MiB beside the cache; lower gpu_memory_utilization"
            ) from error
        self._close = observe_forwards(runner, self._store)

    def close(self) -> None:
        """Stop observing the runner and drop the rows."""
        self._close()
        self._rows.clear()

    def _store(self, output: Any, slots_by_layer: dict[str, torch.Tensor]) -> None:
        slots = slots_by_layer[self._layer][: len(output[0])]
        for name, rows in rows_of(output, len(slots)).items():
            self._table(name, rows)[slots] = rows

    def _table(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        table = self._rows.get(name)
        if table is None or table.shape[1:] != rows.shape[1:] or table.dtype != rows.dtype:
            device = self._rows[HIDDEN].device
            self._rows[name] = table = torch.zeros(self._count, *rows.shape[1:], dtype=rows.dtype, device=device)
        return table

    def write(self, parts: Sequence[SpanSlice], slots: torch.Tensor) -> None:
        """Write the rows of loaded spans into these slots; a merged span has none, and answers over it return none."""
        filled = [p for p in parts if p.span.outputs]
        outputs = concat_outputs([{n: rows[p.begin : p.stop] for n, rows in p.span.outputs.items()} for p in filled])
        tokens = torch.tensor([p.stop - p.begin for p in parts], dtype=torch.int64)
        slots = slots[torch.tensor([bool(p.span.outputs) for p in parts]).repeat_interleave(tokens)]
        for name, rows in outputs.items():
            table = self._table(name, rows)
            table[slots.to(table.device)] = rows.to(table.device)

    def read(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of the rows of these slots, on the model's device."""
        return {name: rows[to_device(slots, rows.device)] for name, rows in self._rows.items()}


class Queries:
    """Rotated queries of all layers, captured until `close`: vLLM keeps keys and values only.

    `ctxwin.kv.merge` weighs slots by them. Memory: the queries of all tokens computed meanwhile. ``paged``: the worker's cache.
    """

    def __init__(self, paged: PagedKV) -> None:
        self._paged = paged
        self._queries: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in paged.layers]  # with their slots
        for index, layer in enumerate(paged.layers):
            layer.impl.forward = self._hooked(index, layer.impl.forward)

    def close(self) -> None:
        """Capture no more."""
        for layer in self._paged.layers:
            del layer.impl.forward  # its class has one

    def _hooked(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
            if (slots := _slots()) is not None:
                rows = query[: len(slots)].detach().clone()
                self._queries[index].append((slots[: len(rows)].clone(), rows))
            return plain(layer, query, *args, **options)

        return forward

    def sums(self, blocks: Sequence[int], begin: int, end: int) -> torch.Tensor:
        """Return the `attention_sums` of a request's tokens ``[0, end)`` by those from ``begin`` on, ``[layers, end]``.

        Raises LookupError for a token that was not computed.
        """
        wanted, sums = self._paged.slots(blocks, begin, end).tolist(), []
        layers = zip(self._paged.layers, self._queries, self._paged.read(blocks, 0, end)[0], strict=True)
        for layer, forwards, keys in layers:
            rows = {slot: row for slots, rows in forwards for slot, row in zip(slots.tolist(), rows, strict=True)}
            if not rows.keys() >= set(wanted):
                raise LookupError(NOT_COMPUTED)
            sums.append(attention_sums(torch.stack([rows[i] for i in wanted]), keys, float(layer.impl.scale)))
        return torch.stack(sums)


def _slots() -> torch.Tensor | None:
    """Return the slot of each token of the running forward, -1 for padding; None in a warm-up."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    mapping = get_forward_context().slot_mapping
    return next(iter(mapping.values()), None) if isinstance(mapping, dict) else None
