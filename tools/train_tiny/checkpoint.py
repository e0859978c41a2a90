"""The trainer's checkpoint: one safetensors file, replaced atomically, the rest of the state as JSON in its header."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_NAME = "trainer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """Training state restored in addition to the weights."""

    state: dict[str, Any]
    moments: dict[str, Tensor]

    def restore(self, optimizer: torch.optim.AdamW) -> None:
        """Put the moments back into an optimizer over the same parameters."""
        if "optimizer.step" not in self.moments:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            moments = {n: self.moments[f"optimizer.{index}.{n}"].to(parameter.device) for n in _MOMENTS}
            optimizer.state[parameter] = {"step": self.moments["optimizer.step"].clone(), **moments}


def save_checkpoint(
    folder: Path, tensors: dict[str, Tensor], optimizer: torch.optim.AdamW, state: dict[str, Any]
) -> None:
    """Write weights, optimizer moments and a JSON-able state."""
    saved = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        moments = optimizer.state.get(parameter)
        if moments:
            saved["optimizer.step"] = moments["step"].cpu()
            saved |= {f"optimizer.{index}.{name}": moments[name].contiguous() for name in _MOMENTS}
    temporary = folder / f"{_NAME}.tmp"
    save_file(saved, temporary, metadata={"state": json.dumps(state)})
    temporary.replace(folder / _NAME)


def load_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint | None:
    """Copy saved weights into `tensors` in place; returns the rest, or None where there is no checkpoint."""
    path = folder / _NAME
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        state = json.loads(file.metadata()["state"])
        names = list(file.keys())
        moments = {name: file.get_tensor(name) for name in names if name.startswith("optimizer.")}
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
    return Checkpoint(state, moments)
