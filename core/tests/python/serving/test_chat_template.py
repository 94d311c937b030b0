"""Chat templates render as transformers renders them, and cannot leave their sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.errors import ModelError, RequestError
from tokenspeed.serving.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'exact'."},
    {"role": "user", "content": "Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "ü<"}}}],
    },
    {"role": "tool", "content": "ok", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "Yes, "},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d <x>", "parameters": {"type": "object", "properties": {}}},
    }
]

CHATML = """{%- if tools %}
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{% endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}
{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson(indent=2) }}{% endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ bos_token }}{{ extra_key | default('none') }}"""


def oracle(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, bos_token="<s>", **options)
    return rendered[0]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generation", [True, False])
def test_rendering_equals_transformers(tools: list[dict[str, Any]] | None, generation: bool) -> None:
    """Trimmed blocks, loop controls, the generation block, tojson without HTML escapes, special tokens and extra variables."""
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    mine = template.render(MESSAGES, tools=tools, add_generation_prompt=generation, extra={"extra_key": "x"})
    assert mine == oracle(CHATML, MESSAGES, tools=tools, add_generation_prompt=generation, extra_key="x")


@pytest.mark.parametrize("content", ["Yes, ", "Yes,", " a\n"])
@pytest.mark.parametrize("shown", ["{{ message.content }}", "{{ message.content | trim }}"])
def test_continuing_the_final_message_equals_transformers(content: str, shown: str) -> None:
    """The prompt ends right behind the last message's text, whether or not the template strips it."""
    source = "{% for message in messages %}<{{ message.role }}>" + shown + "</>\n{% endfor %}"
    messages = [MESSAGES[1], {"role": "assistant", "content": content}]
    mine = ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert mine == oracle(source, messages, continue_final_message=True)


def test_a_template_may_refuse_a_conversation() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_template_cannot_leave_the_sandbox() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(RequestError, match=r"unsafe|not safe"):
        template.render(MESSAGES)
    mutating = ChatTemplate("{{ messages.append(1) }}", {})
    with pytest.raises(RequestError):
        mutating.render(MESSAGES)


def test_a_broken_template_is_refused_at_start() -> None:
    with pytest.raises(ModelError, match="--chat-template"):
        ChatTemplate("{% if %}", {})


def test_strftime_now_is_offered() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]).isdigit()
