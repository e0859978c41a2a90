"""LoRA adapters: a model with one is another model, whose KV has names of its own."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxwin.engines.encoding.checkpoint import weights_digest
from ctxwin.errors import UnsupportedModel
from ctxwin.hashing import digest

_serial = itertools.count(1)
_numbers: dict[str, int] = {}


@dataclass(frozen=True)
class Adapter:
    """A folder in PEFT's layout.

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

        Cost: reading its weights once, for their digest.
        """
        path = Path(folder).expanduser().resolve()
        try:
            config = json.loads((path / "adapter_config.json").read_text())
            rank = int(config["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"lora must be a folder with an adapter_config.json, got {str(folder)!r}: {error}"
            ) from error
        if config.get("peft_type", "LORA") != "LORA":
            raise UnsupportedModel(f"an adapter must be of type LORA, got {config['peft_type']!r}; merge it first")
        return cls(path, digest("lora", config, weights_digest(path)), rank)

    @property
    def request(self) -> Any:
        """vLLM's ``LoRARequest``, named by the digest: the name separates blocks of vLLM's prefix cache."""
        from vllm.lora.request import LoRARequest

        number = _numbers.get(self.id) or _numbers.setdefault(self.id, next(_serial))
        return LoRARequest(self.id, number, str(self.path))


def identity_with(identity: str, adapter: Adapter | None) -> str:
    """Return the identity of a model with an adapter."""
    return identity if adapter is None else digest("adapted", identity, adapter.id)


def options_for(adapter: Adapter) -> dict[str, Any]:
    """Return the engine arguments of vLLM under which the adapter can be served, with up to three others."""
    return {"enable_lora": True, "max_loras": 4, "max_lora_rank": next(r for r in _RANKS if r >= adapter.rank)}


_RANKS = (8, 16, 32, 64, 128, 256, 320, 512, 1 << 30)  # those that vLLM takes
