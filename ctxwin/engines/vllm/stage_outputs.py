"""Stage outputs on vLLM: tensors with a row for each slot of the paged cache, filled beside it.

A forward of vLLM's model runner writes its tokens' KV into slots; a hook on the model writes what it returns into rows of the
same numbers, as vLLM-Omni does ("Automatic Prefix Caching in Omni Models"). Whatever finds a block in the prefix cache finds
its rows, loads and captures treat both alike, and a block's partial tail is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        found = _slots()
        if found is None:
            return
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


class Queries:
    """The rotated queries of all layers, for as long as somebody listens: attention keeps keys and values only.

    They are what `ctxwin.kv.merge` weighs slots by. Memory: the queries of all that is computed meanwhile.

    Args:
        layers: attention layers in order, of a model that runs in this process.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._heard: list[dict[int, torch.Tensor]] = [{} for _ in layers]
        self._plain = [layer.impl.forward for layer in layers]

    def __enter__(self) -> Queries:
        for index, (layer, plain) in enumerate(zip(self._layers, self._plain, strict=True)):
            layer.impl.forward = self._listening(index, plain)
        return self

    def __exit__(self, *exc: object) -> None:
        for layer in self._layers:
            del layer.impl.forward  # its class has one

    def _listening(self, index: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
            found = _slots()
            if found is not None:
                rows = query[: len(found)].detach().clone()
                self._heard[index].update(zip(found.tolist(), rows, strict=False))
            return plain(layer, query, *args, **options)

        return forward

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Queries of the tokens in these slots, ``[T, L, H, D]`` on the CPU. KeyError for one that was not computed."""
        made = [torch.stack([heard[slot] for slot in slots.tolist()]) for heard in self._heard]
        return torch.stack(made, dim=1).to("cpu")


def _slots() -> torch.Tensor | None:
    """Slot of each token of the forward that runs now, -1 for padding; None in a warm-up."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    mapping = get_forward_context().slot_mapping
    return next(iter(mapping.values()), None) if isinstance(mapping, dict) else None
