"""Pieces read off chat templates, and templates that have none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ctxwin.engines.encoding.templates import Template
from ctxwin.errors import UnsupportedModel
from engines.models import CHATML
from engines.tool_models import HERMES, TOOL_ROLE

IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
STRIPS_THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}",
)
NUMBERS_PICTURES = "{% set n = namespace(v=0) %}" + CHATML.replace(
    "<|vision_start|>", "{% set n.v = n.v + 1 %}Picture {{ n.v }}: <|vision_start|>"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
DROPS_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
THINKING_PROMPT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
ALTERNATES = (
    "{% set turns = messages | rejectattr('role', 'equalto', 'system') | list %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}" + CHATML
)
NUMBERS_TURNS = CHATML.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.index }}\n")
LAST_ONLY = CHATML.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
MERGES_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<s>[INST] "
    "{% if loop.first and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }} [/INST]{% endfor %}"
)
TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")


def template(source: str | None, image: tuple[str, str, str] | None = IMAGE) -> Template:
    if source is None:
        return Template(None, image)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    compiled = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)

    def render(messages: list[dict[str, Any]], generation: bool, tools: Any = None) -> str:
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=generation, raise_exception=refuse)

    made = Template(render, image)
    made.rendered = render  # type: ignore[attr-defined]
    return made


def test_chatml() -> None:
    made = template(CHATML)
    assert not made.plain
    assert made.system_prompt("x") == ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n")
    assert made.system_prompt("") == ("<|im_start|>user\n", "")
    assert made.closing == "<|im_end|>\n<|im_start|>assistant\n"
    reopened = "<|im_end|>\n<|im_start|>user\n"
    assert made.turns("assistant") == ("<|im_end|>\n<|im_start|>assistant\n", reopened)
    assert made.turns("tool") == ("<|im_end|>\n<|im_start|>tool\n", reopened)
    assert made.exchange("a") == (made.closing, "a", reopened)
    assert made.picture() == ("<|vision_start|>", "<|vision_end|>")
    made.check_message("user", [{"type": "text", "text": "see "}, {"type": "image"}])


ROLES = st.sampled_from(["user", "assistant", "tool", "system"])


@settings(max_examples=25, deadline=None)
@given(
    st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1),
    st.lists(st.tuples(ROLES, st.text(st.characters(codec="utf-8"), min_size=1)), max_size=4),
)
def test_pieces_put_together_are_the_rendered_conversation(system_prompt: str, turns: list[tuple[str, str]]) -> None:
    made = template(CHATML)
    before, after = made.system_prompt(system_prompt)
    text = before + system_prompt + after
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": "open "}]
    text += "open "
    for role, content in turns:
        around = made.turns(role)
        text += around[0] + content + around[1] + "next"
        messages += [{"role": role, "content": content}, {"role": "user", "content": "next"}]
    assert text + made.closing == made.rendered(messages, True)  # type: ignore[attr-defined]


def test_no_template_is_plain_concatenation() -> None:
    made = template(None)
    assert made.plain
    assert (made.system_prompt("x"), made.system_prompt(""), made.closing) == (("", "\n"), ("", ""), "\n")
    assert made.exchange("a") == ("\n", "a", "\n")
    with pytest.raises(UnsupportedModel, match="no chat template"):
        made.turns("user")


@pytest.mark.parametrize("source", [NO_SYSTEM, DROPS_SYSTEM])
def test_no_system_turn(source: str) -> None:
    made = template(source)
    with pytest.raises(UnsupportedModel, match="no system turn"):
        made.system_prompt("x")
    assert made.system_prompt("") == ("<|im_start|>user\n", "")
    assert made.turns("assistant")[0] == made.closing


def test_a_system_text_merged_into_the_user_turn_is_a_header() -> None:
    made = template(MERGES_SYSTEM)
    assert made.system_prompt("x") == ("<s>[INST] ", "\n\n")
    assert made.system_prompt("") == ("<s>[INST] ", "")


def test_numbered_pictures() -> None:
    made = template(NUMBERS_PICTURES)
    assert made.turns("assistant")
    with pytest.raises(UnsupportedModel, match="numbers its pictures"):
        made.picture()


@pytest.mark.parametrize(
    ("written", "around"),
    [
        ("<|image_pad|>\n", ("<|vision_start|>", "<|vision_end|>\n")),  # as InternVL: the processor adds the tokens
        ("<|vision_start|>image<|image_pad|><|vision_end|>", ("<|vision_start|>image", "<|vision_end|>")),  # as Kimi
        ("Picture: <|vision_start|><|image_pad|><|vision_end|>", ("Picture: <|vision_start|>", "<|vision_end|>")),
    ],
)
def test_text_that_always_stands_around_a_picture(written: str, around: tuple[str, str]) -> None:
    made = template(CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", written))
    assert made.picture() == around
    made.check_message("user", [{"type": "text", "text": "see "}, {"type": "image"}])


def test_a_text_model_has_no_pictures() -> None:
    with pytest.raises(UnsupportedModel, match="does not see"):
        template(CHATML, None).picture()


def test_a_text_template_does_not_take_pictures() -> None:
    made = template("{% for m in messages %}<u>{{ m.content + '' }}</u>{% endfor %}")
    with pytest.raises(UnsupportedModel, match="pictures"):
        made.picture()


def test_stripped_thinking() -> None:
    made = template(STRIPS_THINKING)
    made.check_message("assistant", "red")
    with pytest.raises(UnsupportedModel, match="rewrites an earlier assistant turn"):
        made.check_message("assistant", "<think>hm</think>red")
    for answer in ("red", "<think>hm</think>red", "hm</think>\n red"):
        assert made.exchange(answer) == (made.closing, "red", "<|im_end|>\n<|im_start|>user\n")


def test_a_generation_prompt_that_later_turns_do_not_show() -> None:
    made = template(THINKING_PROMPT)
    assert made.closing.endswith("<think>\n")
    made.check_message("assistant", "red")
    assert made.exchange("red")[:2] == ("<|im_end|>\n<|im_start|>assistant\n", "red")


@pytest.mark.parametrize(
    ("source", "role", "reason"),
    [
        (ALTERNATES, "user", "no user turn"),
        (NUMBERS_TURNS, "assistant", "depending on its place"),
        (LAST_ONLY, "assistant", "no assistant turn"),
    ],
)
def test_turns_that_cannot_be_cut_out(source: str, role: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        template(source).turns(role)


def test_roles_that_alternate_still_take_answers() -> None:
    made = template(ALTERNATES)
    assert made.turns("assistant")[0] == made.closing


def test_blanks_at_the_ends_may_be_trimmed() -> None:
    template(TRIMS).check_message("assistant", " red\n")
    assert template(TRIMS).exchange(" red\n")[1] == " red\n"


def test_an_answer_that_no_earlier_turn_can_show_stays_as_it_is() -> None:
    for answer in ("CTXWINLAST", "CTXWINUSER", " ", ""):
        assert template(STRIPS_THINKING).exchange(answer)[1] == answer
    with pytest.raises(UnsupportedModel, match="no assistant turn"):
        template(LAST_ONLY).exchange("red")


def test_a_template_without_the_user_text_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="as it is"):
        template("{% for m in messages %}{{ m.content | upper }}!{% endfor %}".replace("upper", "lower"))
    with pytest.raises(UnsupportedModel, match=r"does not: no such model$"):
        template("{{ raise_exception('no such model') }}")


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}
MID_TOOLS = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages %}{% if tools and loop.last %}{{ tools | tojson }}{% endif %}"
)


def test_tools_are_text_of_the_system_turn() -> None:
    made = template(HERMES)
    before, after = made.system_prompt("x")
    for text, messages in [("", []), ("be short", [{"role": "system", "content": "be short"}])]:
        system = made.system(text, [TOOL])
        shown = made.rendered([*messages, {"role": "user", "content": "q"}], True, [TOOL])  # type: ignore[attr-defined]
        assert before + system + after + "q" + made.closing == shown


def test_calls_and_results() -> None:
    made = template(HERMES)
    assert made.answer("red") == "red"
    assert made.answer("") == ""
    assert made.answer("", [CALL]) == '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    turn = made.tool_turn()
    reopened = "<|im_end|>\n<|im_start|>user\n"
    assert (turn.opening, turn.tail) == (reopened + "<tool_response>\n", "\n</tool_response>")
    assert (turn.between, turn.reopening) == (turn.tail + "\n<tool_response>\n", turn.tail + reopened)
    turn = template(TOOL_ROLE).tool_turn()
    assert (turn.opening, turn.between) == ("<|im_end|>\n<|im_start|>tool\n",) * 2
    assert (turn.tail, turn.reopening) == ("", reopened)


@pytest.mark.parametrize(
    ("source", "reason"), [(CHATML, "takes no tools"), (MID_TOOLS, "elsewhere"), (None, "no chat template")]
)
def test_templates_without_tools_in_front(source: str | None, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        template(source).system("x", [TOOL])


def test_templates_that_drop_calls() -> None:
    for source, reason in [(CHATML, "drops tool calls"), (None, "no chat template")]:
        with pytest.raises(UnsupportedModel, match=reason):
            template(source).answer("red", [CALL])
        with pytest.raises(UnsupportedModel, match=reason):
            template(source).tool_turn()
