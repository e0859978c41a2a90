"""LoRA adapters: a model with one is another model, whose KV has names of its own."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxwin.engines.encoding.checkpoint import weights_digest
from ctxwin.errors import UnsupportedModel
from ctxwin.hashing import digest

_serial = itertools.count(1)
_numbers: dict[str, int] = {}
_copies: dict[str, tempfile.TemporaryDirectory[str]] = {}


@dataclass(frozen=True)
class Adapter:
    """An adapter in PEFT's layout; ``path`` is a copy of its folder.

    Attributes:
        id: digest of its config and weights; part of the identity of KV that is computed with it.
        rank: of its matrices.
    """

    path: Path
    id: str
    rank: int

    @classmethod
    def open(cls, folder: str | Path) -> Adapter:
        """Raises ValueError for a folder without an adapter, UnsupportedModel for one that vLLM cannot serve exactly.

        Cost: a copy of its weights, which vLLM reads when a request comes: the folder may be another checkpoint's by then.
        """
        from vllm.config.lora import LoRAConfig
        from vllm.lora.peft_helper import PEFTHelper

        path, copy = Path(folder).expanduser().resolve(), tempfile.TemporaryDirectory(prefix="ctxwin-adapter-")
        try:
            for file in (path / "adapter_config.json", *path.glob("*.safetensors")):
                shutil.copy(file, copy.name)
            config = json.loads((Path(copy.name) / "adapter_config.json").read_text())
            rank = int(config["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"lora must be a folder with an adapter_config.json, got {str(folder)!r}: {error}"
            ) from error
        if config.get("peft_type", "LORA") != "LORA":
            raise UnsupportedModel(f"an adapter must be of type LORA, got {config['peft_type']!r}; merge it first")
        try:
            PEFTHelper.from_dict(config).validate_legal(LoRAConfig(max_lora_rank=max_rank(rank)))
        except ValueError as error:
            raise UnsupportedModel(f"an adapter must be one that vLLM serves, got {str(folder)!r}: {error}") from error
        adapter_id = digest("lora", config, weights_digest(Path(copy.name)))
        copy = _copies.setdefault(adapter_id, copy)  # kept while the process runs
        return cls(Path(copy.name), adapter_id, rank)

    @property
    def request(self) -> Any:
        """vLLM's ``LoRARequest``, named by the digest: the name separates blocks of vLLM's prefix cache."""
        from vllm.lora.request import LoRARequest

        number = _numbers.get(self.id) or _numbers.setdefault(self.id, next(_serial))
        return LoRARequest(self.id, number, str(self.path))


def options_for(adapter: Adapter) -> dict[str, Any]:
    """Return the engine arguments of vLLM under which the adapter can be served, with up to three others."""
    return {"enable_lora": True, "max_loras": 4, "max_lora_rank": max_rank(adapter.rank)}


def max_rank(rank: int) -> int:
    """Return the least ``max_lora_rank`` of vLLM for an adapter of ``rank``."""
    return next(r for r in (8, 16, 32, 64, 128, 256, 320, 512, 1 << 30) if r >= rank)
