"""Compilers of schemas and grammars in vLLM's server."""

from __future__ import annotations

from typing import Any


def grammar_vocabulary(client: Any) -> str | None:
    """Return the tokens that vLLM's xgrammar backend gives its compiler, as xgrammar writes them.

    None where the server has no tokenizer.

    Args:
        client: vLLM's ``AsyncLLM``.

    Raises: any error of xgrammar for an unsupported tokenizer.
    """
    import xgrammar

    tokenizer = client.renderer.tokenizer
    if tokenizer is None:
        return None
    size = client.model_config.get_vocab_size()
    return str(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size).serialize_json())


def compiles_with_xgrammar(client: Any) -> bool:
    """Return whether xgrammar is the only compiler, so that vLLM fails where it cannot compile."""
    return client.vllm_config.structured_outputs_config.backend in ("auto", "xgrammar")
