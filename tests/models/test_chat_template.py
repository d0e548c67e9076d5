"""Chat templates render as transformers renders them, in a sandbox, and fail as ValueErrors."""

from __future__ import annotations

from typing import Any

import pytest

from rooftile.models.chat_template import ChatTemplate, _compiled

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "Hello",
        "tool_calls": [{"name": "é", "arguments": {"b": 1, "a": [2]}}],
    },
]
TEMPLATES = [
    # Blocks on lines of their own leave no blank lines; indentation before a block is dropped.
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n<u>{{ m.content }}</u>\n    {% endif %}\n{% endfor %}\n",
    "{{ messages | tojson }}{{ messages[2].tool_calls | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
    "{{ bos_token }}{% if add_generation_prompt %}>{% endif %}{{ extra }}{{ documents is none }}",
    "{{ strftime_now('%Y') | length }}{% if tools is none %}no tools{% endif %}",
    "{% macro m(x) %}[{{ x.content | trim }}]{% endmacro %}{% for x in messages %}{{ m(x) }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(template: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        [MESSAGES],
        chat_template=template,
        add_generation_prompt=prompt,
        bos_token="<s>",
        extra="more",
    )
    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(
        MESSAGES, add_generation_prompt=prompt, extra="more"
    )
    assert ours == expected[0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses these messages: roles must alter",
        ),
        ("{% for %}", "refuses these messages"),
        ("{{ messages[0].content.missing.more }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages: access to"),
        ("{{ 'x' * 3 }}{% include 'file' %}", "refuses these messages"),
    ],
)
def test_templates_that_fail(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages is \[\]"),
        ("hello", "messages is 'hello'; expected a non-empty list"),
        ({"role": "user"}, "expected a non-empty list"),
        (["hello"], r"messages\[0\] is 'hello'; expected an object with role"),
        ([{"content": "x"}], r"messages\[0\] is"),
    ],
)
def test_messages_of_another_form(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate("x", {}).render(messages)


def test_named_templates_without_a_default() -> None:
    with pytest.raises(ValueError, match="named rag, but no 'default'"):
        ChatTemplate({"rag": "x"}, {}).render(MESSAGES)


def test_a_template_is_compiled_once_and_keeps_nothing() -> None:
    source = "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}"
    before = _compiled.cache_info().misses
    rendered = [ChatTemplate(source, {}).render(MESSAGES[:length]) for length in (1, 3, 2)]
    assert rendered == ["1", "3", "2"]
    assert _compiled.cache_info().misses == before + 1
