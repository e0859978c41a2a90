"""A tiny random checkpoint whose chat template takes tools in the manner of Qwen and Hermes."""

from __future__ import annotations

from pathlib import Path

from engines.models import edit_config, write_text_model, write_vision_model

CONTENT = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
# A line end right behind a block is written as an expression: it would be trimmed.
# Tools in the system turn, calls as JSON between tags, results of one round in one user turn.
HERMES = CONTENT + (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n\nYou may call functions.\n<tools>"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}</tools>\n"
    "Answer with <tool_call></tool_call> tags.<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ show(m.content) }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant{% if m.content %}{{ '\n' }}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ show(m.content) }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Tool results in a turn of their own role.
TOOL_ROLE = HERMES.replace(
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ show(m.content) }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}",
    "<|im_start|>tool\n{{ show(m.content) }}<|im_end|>\n{% endif %}",
)


def write_tool_model(folder: Path, template: str = HERMES, *, vision: bool = False) -> Path:
    """A random text model, or a random Qwen2.5-VL, with this template."""
    assert TOOL_ROLE != HERMES
    if vision:
        write_vision_model(folder)
        (folder / "chat_template.jinja").write_text(template)
    else:
        write_text_model(folder, template)
    edit_config(folder, max_position_embeddings=4096)
    return folder
