"""The vision tower in the process of the model: this one, or vLLM's worker through its worker extension."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ctxwin.engines.encoding.families import FAMILIES, is_clip, patch_places
from ctxwin.kv.config import text_backbone
from ctxwin.store import codec
from ctxwin_vllm.internals import draft_model_of, pipeline, stage_inputs, tensor_parallel
from ctxwin_vllm.lifecycle.folders import write_file
from ctxwin_vllm.relocation import TOKENS, refusal
from ctxwin_vllm.stage_outputs import StageOutputs
from ctxwin_vllm.transport import PARAM, connect

_INPUTS, _EMBEDDINGS = "media-", "encoded-"
_PIXELS_ONLY = ("kimi_k25", "kimi_vl", "paddleocr_vl")

Vision = Callable[..., "torch.Tensor"]
"""``(inputs, grids int64 [items, 3]) -> embeddings [tokens, width]`` of all items in order, on the CPU.

Inputs are pixels; with ``audio=True`` the spectrogram ``[bins, frames]`` of one sound.
"""


def takes_pixels_only(config: Any) -> bool:
    """Return True if embeddings must bypass vLLM's model of this family, which takes pixels only, or one shape only."""
    family = FAMILIES.get(str(getattr(text_backbone(config), "model_type", "")))
    return family is not None and (family.tiles or family.marks or str(config.model_type) in _PIXELS_ONLY)


def encode_media(
    model: Any, config: Any, inputs: torch.Tensor, grids: torch.Tensor, *, audio: bool = False
) -> torch.Tensor:
    """Run a model's vision tower, for images and videos alike, or its audio tower.

    Args:
        model: vLLM's.
        config: its Hugging Face config.
        inputs: pixels as the family's processor gives them, of all items.
        grids: int64 ``[items, 3]``, the grid (t, h, w) of each.
        audio: whether they are a spectrogram instead.

    Returns:
        Embeddings ``[tokens, hidden * (1 + D)]`` of all items in order, on the CPU, in the model's dtype; D as in
        `ctxwin.engines.hf.model.Inputs`.
    """
    like = next(model.parameters())
    inputs = inputs.to(device=like.device, dtype=like.dtype)
    config = text_backbone(config)
    family = FAMILIES[str(config.model_type)]
    kwargs: dict[str, Any]
    if audio:
        mask = torch.ones(1, inputs.shape[-1], dtype=torch.int64, device=like.device)
        kwargs = {"input_audio_features": inputs, "audio_feature_lengths": grids[:, 2], "feature_attention_mask": mask}
    elif family.tiles and family.marks:
        mask = torch.ones(inputs[0].shape[0], *inputs.shape[-2:], dtype=torch.bool, device=like.device)
        kwargs = {"pixel_values": inputs[0], "pixel_attention_mask": mask, "num_patches": grids[:, 0]}
    elif config.model_type == "deepseek_vl_v2":
        kwargs = {"pixel_values": inputs, "images_spatial_crop": torch.ones(len(grids), 2, dtype=torch.int64)}
    elif family.square:
        kwargs = {"pixel_values": inputs, "num_patches": torch.ones(len(inputs), dtype=torch.int64)}
    elif is_clip(config, inputs):
        kwargs = {"pixel_values_videos": inputs[None]}
    elif family.marks:
        kwargs = {"pixel_values": inputs, "image_sizes": grids[:, 1:]}
    elif family.tiles:
        token = torch.tensor([config.image_token_id])
        kwargs = {"pixel_values": inputs, "image_num_patches": grids[:, 0], "image_token_id": token}
    elif config.model_type == "kimi_vl":
        kwargs = {"pixel_values": inputs, "image_grid_hws": grids[:, 1:]}
    elif config.model_type == "paddleocr_vl":
        kwargs = {"pixel_values": torch.split(inputs, grids.prod(-1).tolist()), "image_grid_thw": grids}
    else:
        kwargs = {"pixel_values": inputs, "grid_thws" if config.model_type == "kimi_k25" else "image_grid_thw": grids}
    with torch.inference_mode():
        if family.listed:  # vLLM's own method reads the free memory of an accelerator
            places = patch_places(grids, inputs.shape[-2]).to(like.device)
            features = model.vision_tower(inputs, places).last_hidden_state
            embeddings = model.embed_vision(inputs_embeds=features.to(like.dtype)[None])
        else:
            embeddings = model.embed_multimodal(**kwargs)
        rows = torch.cat(list(embeddings)).to("cpu")
    # A copy outside inference mode is an ordinary tensor, which callers may use anywhere.
    return rows.clone()


class WorkerExtension:
    """Methods that vLLM mixes into each of its workers (``worker_extension_cls``). Tensors travel as files."""

    if TYPE_CHECKING:
        model_config: Any
        vllm_config: Any
        model_runner: Any

        def get_model(self) -> Any: ...

    def ctxwin_step(self) -> None:
        """Return once the previous steps have ended, and what they read is written."""
        connect(self.vllm_config.kv_transfer_config.kv_connector_extra_config[PARAM]).flush()

    def ctxwin_relocation(self) -> str:
        """See `relocation.refusal`. Runs on all ranks in step, as the model's layers require; ranks differ in heads only."""
        endpoint = connect(self.vllm_config.kv_transfer_config.kv_connector_extra_config[PARAM])
        assert endpoint.paged is not None
        inputs, draft_model = stage_inputs(self.model_runner, TOKENS), draft_model_of(self)
        model = self.get_model()
        return refusal(model, self.vllm_config, endpoint.paged, inputs, draft_model, endpoint.draft_model)

    def ctxwin_queries(self, on: bool) -> None:
        """See `Endpoint.capture_queries`."""
        connect(self.vllm_config.kv_transfer_config.kv_connector_extra_config[PARAM]).capture_queries(on)

    def ctxwin_outputs(self) -> None:
        """Keep stage outputs from now on; their rows are the same on all ranks of the last stage, whose first one keeps them."""
        endpoint = connect(self.vllm_config.kv_transfer_config.kv_connector_extra_config[PARAM])
        stage, stages = pipeline()
        if stage == stages - 1 and tensor_parallel()[0] == 0:
            assert endpoint.paged is not None
            endpoint.outputs = StageOutputs(self.model_runner, endpoint.paged)

    def ctxwin_encode_media(self, source: str, target: str, audio: bool) -> None:
        """Read pixels (or a spectrogram: ``audio``) and grids from ``source``, write embeddings to ``target``.

        Every rank runs the tower, the first one writes. Raises ValueError for files outside the transport's folder: a server
        may let its clients call methods of workers.
        """
        folder = Path(self.vllm_config.kv_transfer_config.kv_connector_extra_config[PARAM])
        for path, prefix in ((Path(source), _INPUTS), (Path(target), _EMBEDDINGS)):
            if path.parent != folder or not path.name.startswith(prefix):
                raise ValueError(f"files of ctxwin_encode_media must be {folder}/{prefix}..., got {path}")
        tensors, _ = codec.decode_tensors(Path(source).read_bytes())
        if pipeline()[0]:
            return  # the tower is in the first stage
        embeddings = encode_media(self.get_model(), self.model_config.hf_config, **tensors, audio=audio)
        if tensor_parallel()[0] == 0:
            write_file(Path(target), codec.encode_tensors({"embeddings": embeddings}))


def remote(rpc: Callable[..., list[Any]], folder: Path) -> Vision:
    """Return a `Vision` that runs in vLLM's workers; ``rpc`` is `Driver.rpc`, ``folder`` its files' folder."""

    def run(inputs: torch.Tensor, grids: torch.Tensor, *, audio: bool = False) -> torch.Tensor:
        name = secrets.token_hex(8)
        source, target = folder / f"{_INPUTS}{name}", folder / f"{_EMBEDDINGS}{name}"
        try:
            write_file(source, codec.encode_tensors({"inputs": inputs, "grids": grids}))
            rpc("ctxwin_encode_media", str(source), str(target), audio)
            return codec.decode_tensors(target.read_bytes())[0]["embeddings"].clone()
        finally:
            source.unlink(missing_ok=True)
            target.unlink(missing_ok=True)

    return run
