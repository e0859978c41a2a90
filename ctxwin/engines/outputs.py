"""Stage outputs: per-token tensors that a model passes to the next stage of a pipeline, beside its KV.

Talkers, diffusion heads and embedders read the hidden states of the preceding model. A cached prefix produces none, so they
are stored with the KV: a span holds its tokens' rows, in the same record. vLLM-Omni keeps them in tensors indexed like the
paged cache ("Automatic Prefix Caching in Omni Models"). Its rule is followed here: every tensor that a forward returns with
one row per token is an output, under its own name.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ctxwin.errors import EngineFailed, OutputGone, StoreFull
from ctxwin.hashing import digest

HIDDEN = "hidden_states"
"""Name of the output that a model returns unnamed: its last hidden states, after the final norm."""
DRAFTER = "drafter."
"""Prefix of the names of a draft model's rows, which are not outputs (`ctxwin_vllm.draft_model`)."""
_CACHES = ("past_key_values",)


def outputs_identity(identity: str, outputs: bool) -> str:
    """Return the identity of a model whose spans hold its outputs: spans without them are never served in their place."""
    return digest("outputs", identity) if outputs else identity


def rows_of(output: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Return the tensors in a forward's output with one row for each of ``tokens`` tokens: ``[tokens, ...]`` by name.

    Nested names are joined by dots. A batch of one counts as its only entry. O(tensors).
    """
    outputs: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(output, ""):
        rows = tensor[0] if tensor.dim() > 1 and tensor.shape[0] == 1 != tokens else tensor
        if tensor.dim() > 2 and tensor.shape[:2] == (1, tokens):
            rows = tensor[0]
        if rows.dim() and rows.shape[0] >= tokens:
            outputs[name or HIDDEN] = rows[:tokens]  # a batch may be padded
    return outputs


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield HIDDEN if name == "last_hidden_state" else name, value
        return
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, list | tuple):
        parts = [(str(i) if i else "", part) for i, part in enumerate(value)]
    else:
        return
    for key, part in parts:
        if key not in _CACHES:
            yield from _tensors(part, f"{name}.{key}" if name and key else name or str(key))


def concat_outputs(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate the rows of neighbouring tokens.

    A drafter's rows are omitted where some part lacks them, because answers do not depend on them.

    Raises:
        EngineFailed: a part lacks an output that another has.
    """
    names = {name for part in parts for name in part}
    names -= {name for name in names if name.startswith(DRAFTER) and any(name not in part for part in parts)}
    if any(names - part.keys() for part in parts):
        raise EngineFailed(f"every span of a prompt must hold the same outputs, of {sorted(names)} some are missing")
    return {name: torch.cat([part[name] for part in parts]) for name in sorted(names)}


class OutputReferences:
    """Stage outputs that wait for a next stage in another process, by the digest of their bytes. Thread-safe.

    Args:
        max_bytes: of all that wait; the oldest give way.
        ttl: seconds for which an output waits.
        clock: as ``time.monotonic``.
    """

    def __init__(self, max_bytes: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.ttl, self._clock = max_bytes, ttl, clock
        self._blobs: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # and until when; the first ends first
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that wait. O(n)."""
        with self._lock:
            self._drop()
            return self._nbytes()

    def put(self, outputs: Mapping[str, torch.Tensor], folder: str = "") -> dict[str, dict[str, Any]]:
        """Keep the outputs of an answer; return a reference to each, plain JSON, by name: its path is in ``folder``. Idempotent.

        Raises:
            StoreFull: they are larger than all that may wait. Cost: a copy and a digest of the bytes.
        """
        from safetensors.torch import save

        blobs = {name: save({name: rows.contiguous()}) for name, rows in outputs.items()}
        if (size := sum(map(len, blobs.values()))) > self.max_bytes:
            raise StoreFull(
                f"the outputs of an answer must have at most {self.max_bytes} bytes together (--max-output-bytes), got {size}"
            )
        references = {}
        for name, blob in blobs.items():
            key, rows = digest("output", blob), outputs[name]
            described = {"shape": list(rows.shape), "dtype": str(rows.dtype).removeprefix("torch."), "bytes": len(blob)}
            described["expires_in"] = self.ttl
            references[name] = {"name": name, "path": f"{folder}/{key}", "digest": key, **described}
            with self._lock:
                self._blobs.pop(key, None)
                self._blobs[key] = blob, self._clock() + self.ttl
                self._drop()
        return references

    def get(self, key: str) -> bytes:
        """Return the bytes that a digest names: a file of safetensors with one tensor, under the output's name.

        Raises OutputGone where it has expired, gave way to others, or never was.
        """
        with self._lock:
            self._drop()
            if key not in self._blobs:
                raise OutputGone(f"output {key[:80]!r} must be one that waits here; it may have expired: ask again")
            return self._blobs[key][0]

    def _nbytes(self) -> int:
        return sum(len(blob) for blob, _ in self._blobs.values())

    def _drop(self) -> None:
        now, size = self._clock(), self._nbytes()
        while self._blobs and (size > self.max_bytes or next(iter(self._blobs.values()))[1] <= now):
            size -= len(self._blobs.popitem(last=False)[1][0])


def load_output(blob: bytes, reference: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of a reference's bytes. Raises EngineFailed where they are not what it names."""
    from safetensors.torch import load

    if digest("output", blob) != reference["digest"]:
        raise EngineFailed(f"the bytes of output {reference['name']!r} must have its digest; fetch it again")
    return load(blob)[reference["name"]]
