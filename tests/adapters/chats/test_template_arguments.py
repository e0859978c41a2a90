"""Variables of chat templates are those that a template reads, and nothing of the tokenizer's."""

from __future__ import annotations

from ctxwin_chats.template_arguments import TemplateArguments, template_variables

TEMPLATE = """{%- set greeting = hello -%}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}
{% if enable_thinking is defined %}{{ tools | tojson(indent=indent) }}{% endif %}{% if loop.last %}{% break %}{% endif %}
{% endfor %}{% if max_length %}{{ raise_exception("x") }}{% endif %}"""


def test_variables_are_those_that_the_template_reads() -> None:
    names = template_variables([TEMPLATE, "{% no jinja", "{{ other }}"])
    assert names == {
        "hello",
        "messages",
        "enable_thinking",
        "tools",
        "indent",
        "max_length",
        "raise_exception",
        "other",
    }
    arguments = TemplateArguments(names)
    arguments.check({"chat_template_kwargs": {"hello": "x", "indent": 2, "other": [{"a": None}], "thinking": True}})
    arguments.check({"chat_template_kwargs": {"documents": [{"text": "x" * 100_000}]}})
    arguments.check({"chat_template_kwargs": None})
