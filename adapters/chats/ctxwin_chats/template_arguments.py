"""Arguments of chat templates: only those that the template reads, none of the tokenizer's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_FIELD = "chat_template_kwargs"
_COMMON = frozenset({
    "add_generation_prompt", "clear_thinking", "continue_final_message", "documents", "enable_thinking",
    "preserve_thinking", "reasoning_effort", "thinking", "thinking_budget",
})  # fmt: skip
"""Variables that clients set for whichever model is served; templates that do not read them ignore them."""
_RESERVED = frozenset({
    "add_special_tokens", "chat_template", "conversation", "conversations", "kwargs", "max_length", "messages", "padding",
    "processor_kwargs", "raise_exception", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self",
    "strftime_now", "text", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Arguments of tokenizers and of template rendering; only vLLM sets them."""
_MOST_NUMBER = 1 << 20
"""Largest number: templates indent, repeat and count by numbers."""
_MOST_TEXT = 64 << 10
"""Characters of one variable as JSON. Documents have the bound of the request's text alone."""


class TemplateArguments:
    """Check of ``chat_template_kwargs``.

    Args:
        variables: names that the served model's templates read.
    """

    def __init__(self, variables: Iterable[str] = ()) -> None:
        self._names = frozenset((_COMMON | set(variables)) - _RESERVED)

    def check(self, data: Any) -> None:
        """Raise ValueError for an argument in a request's body that no template reads, or that is too large."""
        arguments = data.get(_FIELD) if isinstance(data, dict) else None
        if arguments is None:
            return
        if not isinstance(arguments, dict):
            raise ValueError(f"{_FIELD} must be an object, got {type(arguments).__name__}")
        unknown = sorted(arguments.keys() - self._names)
        if unknown:
            raise ValueError(
                f"{_FIELD} must name variables of the chat template ({', '.join(sorted(self._names))}), got "
                f"{', '.join(map(repr, unknown))[:200]}; leave it out"
            )
        for name, value in arguments.items():
            _check_numbers(name, value)
            if name != "documents" and len(json.dumps(value)) > _MOST_TEXT:
                raise ValueError(f"{name} of {_FIELD} must have at most {_MOST_TEXT} characters as JSON")


def _check_numbers(name: str, value: Any) -> None:
    level = [value]
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int | float) and not (math.isfinite(item) and abs(item) <= _MOST_NUMBER):
                raise ValueError(f"numbers in {name} of {_FIELD} must be within {_MOST_NUMBER}, got {str(item)[:40]}")
        level = below


def template_variables(templates: Iterable[str]) -> set[str]:
    """Return the names that Jinja templates read and do not set; none of one that is not valid Jinja."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _Generation])
    names: set[str] = set()
    for template in templates:
        try:
            names |= jinja2.meta.find_undeclared_variables(environment.parse(template))
        except jinja2.TemplateSyntaxError:
            continue  # its chats fail anyway
    return names


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` of transformers' templates, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
