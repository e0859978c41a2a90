"""The renderer of vLLM's server: its chat templates, and its compilers of schemas and grammars."""

from argparse import Namespace
from functools import partial
from typing import Any

from ctxwin_chats.template_arguments import template_variables
from ctxwin_chats.volatile import takes_late_system


class ChatTemplates:
    """The templates of a server's chats, with tools and without.

    Args:
        client: vLLM's ``AsyncLLM``.
        args: of ``vllm serve``.
    """

    def __init__(self, client: Any, args: Namespace) -> None:
        from vllm.renderers.chat_utils import load_chat_template
        from vllm.renderers.hf import HfRenderer, resolve_chat_template

        override, renderer = load_chat_template(args.chat_template), client.renderer
        templates, tokenizer = [override], getattr(renderer, "tokenizer", None)
        variants: tuple[list[Any] | None, ...] = (None, [])
        if isinstance(renderer, HfRenderer) and tokenizer is not None:
            config = client.model_config
            templates = [resolve_chat_template(tokenizer, override, tools, model_config=config) for tools in variants]
        self._templates = [template for template in templates if isinstance(template, str)]
        # vLLM renders gpt-oss and other renderers' models by rules of its own.
        applies = isinstance(renderer, HfRenderer) and client.model_config.hf_config.model_type != "gpt_oss"
        self._tokenizer = tokenizer if applies else None

    def variables(self) -> set[str]:
        """Return the names that the templates read."""
        return template_variables(self._templates)

    def take_late_system(self) -> bool:
        """Return whether they render a system message behind a question where it stands."""
        if self._tokenizer is None or not self._templates:
            return False
        render = partial(self._tokenizer.apply_chat_template, tokenize=False)
        return all(takes_late_system(partial(render, chat_template=template)) for template in self._templates)


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
