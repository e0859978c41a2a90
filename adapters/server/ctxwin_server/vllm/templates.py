"""The chat templates of vLLM's server, as its renderer chooses them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from ctxwin_server.template_arguments import template_variables


def variables_of(client: Any, args: Namespace) -> set[str]:
    """Return the names that the templates of a server's chats read, with tools and without.

    Args:
        client: vLLM's ``AsyncLLM``.
        args: of ``vllm serve``.
    """
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.hf import HfRenderer, resolve_chat_template

    override, renderer = load_chat_template(args.chat_template), client.renderer
    templates = [override]
    variants: tuple[list[Any] | None, ...] = (None, [])
    if isinstance(renderer, HfRenderer) and renderer.tokenizer is not None:
        templates += [
            resolve_chat_template(renderer.tokenizer, override, tools, model_config=client.model_config)
            for tools in variants
        ]
    return template_variables(template for template in templates if isinstance(template, str))
