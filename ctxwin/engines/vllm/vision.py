"""The vision tower, where the model is: in this process, or in vLLM's worker through its worker extension."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ctxwin.engines.encoding.families import FAMILIES, is_clip, patch_places
from ctxwin.engines.vllm.internals import drafter_of, handed_on, pipeline, tensor_parallel
from ctxwin.engines.vllm.lifecycle.folders import write_file
from ctxwin.engines.vllm.relocation import TOKENS, refusal
from ctxwin.engines.vllm.transport import PARAM, connect
from ctxwin.kv.config import thinker
from ctxwin.store import codec

_PIXELS, _SEEN = "see-", "seen-"
_PIXELS_ONLY = ("kimi_k25", "paddleocr_vl")

Vision = Callable[..., "torch.Tensor"]
"""``(pixels, grids int64 [items, 3]) -> embeddings [tokens, width]`` of all items in order, on the CPU.

With ``heard=True`` behind them it is the spectrogram ``[bins, frames]`` of one sound instead of pixels.
"""


def hands_on(config: Any) -> bool:
    """Whether embeddings have to be handed past vLLM's model of this family, which takes pixels only, or one shape only."""
    family = FAMILIES.get(str(getattr(thinker(config), "model_type", "")))
    return family is not None and (family.tiles or family.marks or str(config.model_type) in _PIXELS_ONLY)


def see(model: Any, config: Any, pixels: torch.Tensor, grids: torch.Tensor, heard: bool = False) -> torch.Tensor:
    """One run of a model's tower, for images and videos alike, or of the one that hears.

    Args:
        model: vLLM's.
        config: its Hugging Face config.
        pixels: as the family's processor gives them, of all items.
        grids: int64 ``[items, 3]``, the grid (t, h, w) of each.
        heard: whether it is a spectrogram instead of pixels.

    Returns:
        Embeddings ``[tokens, hidden * (1 + D)]`` of all items in order, on the CPU, in the model's dtype; D as in
        `ctxwin.engines.hf.model.Inputs`.
    """
    like = next(model.parameters())
    shown = pixels.to(device=like.device, dtype=like.dtype)
    config = thinker(config)
    family = FAMILIES[str(config.model_type)]
    given: dict[str, Any]
    if heard:
        whole = torch.ones(1, shown.shape[-1], dtype=torch.int64, device=like.device)
        given = {"input_audio_features": shown, "audio_feature_lengths": grids[:, 2], "feature_attention_mask": whole}
    elif family.tiles and family.marks:
        mask = torch.ones(shown[0].shape[0], *shown.shape[-2:], dtype=torch.bool, device=like.device)
        given = {"pixel_values": shown[0], "pixel_attention_mask": mask, "num_patches": grids[:, 0]}
    elif family.square:
        given = {"pixel_values": shown, "num_patches": torch.ones(len(shown), dtype=torch.int64)}
    elif is_clip(config, pixels):
        given = {"pixel_values_videos": shown[None]}
    elif family.marks:
        given = {"pixel_values": shown, "image_sizes": grids[:, 1:]}
    elif family.tiles:
        token = torch.tensor([config.image_token_id])
        given = {"pixel_values": shown, "image_num_patches": grids[:, 0], "image_token_id": token}
    elif config.model_type == "paddleocr_vl":
        given = {"pixel_values": torch.split(shown, grids.prod(-1).tolist()), "image_grid_thw": grids}
    else:
        given = {"pixel_values": shown, "grid_thws" if config.model_type == "kimi_k25" else "image_grid_thw": grids}
    with torch.inference_mode():
        if family.listed:  # vLLM's own way asks for the free memory of an accelerator
            held = model.vision_tower(shown, patch_places(grids, shown.shape[-2]).to(like.device)).last_hidden_state
            found = model.embed_vision(inputs_embeds=held.to(like.dtype)[None])
        else:
            found = model.embed_multimodal(**given)
        joined = torch.cat(list(found)).to("cpu")
    # A copy outside inference mode is an ordinary tensor, which callers may use anywhere.
    return joined.clone()


class WorkerExtension:
    """Methods that vLLM mixes into each of its workers (``worker_extension_cls``). Tensors travel as files."""

    if TYPE_CHECKING:
        model_config: Any
        vllm_config: Any
        model_runner: Any

        def get_model(self) -> Any: ...

    def ctxwin_relocation(self) -> str:
        """See `relocation.refusal`. The same on every rank but for the heads, and in step, as the model's layers need it."""
        endpoint = connect(self.vllm_config.kv_transfer_config.kv_connector_extra_config[PARAM])
        assert endpoint.paged is not None
        given = handed_on(self.model_runner, TOKENS)
        return refusal(self.get_model(), self.vllm_config, endpoint.paged, given, drafter_of(self), endpoint.drafter)

    def ctxwin_see(self, source: str, target: str, heard: bool) -> None:
        """Reads pixels, or what is ``heard``, and grids from ``source``, writes embeddings to ``target``.

        Every rank runs, the first writes. Raises ValueError for files outside the transport's folder: a server may let its
        clients call methods of workers.
        """
        folder = Path(self.vllm_config.kv_transfer_config.kv_connector_extra_config[PARAM])
        for path, prefix in ((Path(source), _PIXELS), (Path(target), _SEEN)):
            if path.parent != folder or not path.name.startswith(prefix):
                raise ValueError(f"files of ctxwin_see must be {folder}/{prefix}..., got {path}")
        tensors, _ = codec.decode_tensors(Path(source).read_bytes())
        if pipeline()[0]:
            return  # the tower is in the first stage
        found = see(self.get_model(), self.model_config.hf_config, tensors["pixels"], tensors["grids"], heard)
        if tensor_parallel()[0] == 0:
            write_file(Path(target), codec.encode_tensors({"embeddings": found}))


def remote(rpc: Callable[..., list[Any]], folder: Path) -> Vision:
    """A `Vision` that runs in vLLM's workers; ``rpc`` is `Driver.rpc`, ``folder`` its files' folder."""

    def run(pixels: torch.Tensor, grids: torch.Tensor, heard: bool = False) -> torch.Tensor:
        name = secrets.token_hex(8)
        source, target = folder / f"{_PIXELS}{name}", folder / f"{_SEEN}{name}"
        try:
            write_file(source, codec.encode_tensors({"pixels": pixels, "grids": grids}))
            rpc("ctxwin_see", str(source), str(target), heard)
            return codec.decode_tensors(target.read_bytes())[0]["embeddings"].clone()
        finally:
            source.unlink(missing_ok=True)
            target.unlink(missing_ok=True)

    return run
