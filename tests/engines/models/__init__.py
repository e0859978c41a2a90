"""Tiny random checkpoints in transformers layout, so that engine tests need no trained weights."""

from engines.models.gemma import write_gemma3, write_gemma4, write_gemma4_sharing
from engines.models.latent import small_siglip, write_deepseek_vl2, write_kimi, write_kimi_vl
from engines.models.llava import write_llava
from engines.models.omni import OMNI, write_omni
from engines.models.parts import CHATML, SIZES, build_tokenizer, edit_config, wide
from engines.models.text import (
    GEMMA3,
    GEMMA4,
    GEMMA4_SHARING,
    LLAMA3,
    SHARP,
    write_decoder,
    write_hybrid,
    write_llama,
    write_mla_model,
    write_text_model,
)
from engines.models.vision import (
    write_deepseek_ocr,
    write_deepseek_vl,
    write_glm4v,
    write_internvl,
    write_mistral3,
    write_paddleocr,
    write_smolvlm,
    write_vision_model,
)

__all__ = [
    "CHATML",
    "GEMMA3",
    "GEMMA4",
    "GEMMA4_SHARING",
    "LLAMA3",
    "OMNI",
    "SHARP",
    "SIZES",
    "build_tokenizer",
    "edit_config",
    "small_siglip",
    "wide",
    "write_decoder",
    "write_deepseek_ocr",
    "write_deepseek_vl",
    "write_deepseek_vl2",
    "write_gemma3",
    "write_gemma4",
    "write_gemma4_sharing",
    "write_glm4v",
    "write_hybrid",
    "write_internvl",
    "write_kimi",
    "write_kimi_vl",
    "write_llama",
    "write_llava",
    "write_mistral3",
    "write_mla_model",
    "write_omni",
    "write_paddleocr",
    "write_smolvlm",
    "write_text_model",
    "write_vision_model",
]
