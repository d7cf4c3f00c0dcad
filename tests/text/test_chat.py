from __future__ import annotations

import time
from typing import Any

import pytest

from edgespec.errors import PromptError
from edgespec.text.chat import ChatTemplate, Message

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **tokens: str) -> str:
    return ChatTemplate(source, **tokens).render(messages)


def test_messages_as_objects_and_as_mappings_render_alike() -> None:
    template = ChatTemplate(CHATML)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER) == template.render([Message("user", "hi")]) == expected


def test_the_generation_prompt_can_be_left_out() -> None:
    assert ChatTemplate(CHATML).render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_content_is_never_escaped_or_evaluated() -> None:
    content = "<b>&'\"</b> {{ 1 + 1 }} {% raise %} é🙂\0"
    assert render("{{ messages[0].content }}", [Message("user", content)]) == content


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ missing is defined }}", "False"),
        ('{{ {"a": "<é>"} | tojson }}', '{"a": "<é>"}'),
        ('{{ {"a": 1} | tojson(indent=2) }}', '{\n  "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
        ("{% generation %}x{{ 1 }}{% endgeneration %}", "x1"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_renders_as_hugging_face_does(source: str, expected: str) -> None:
    assert render(source, bos="<s>", eos="</s>") == expected


def test_strftime_now_is_the_clock() -> None:
    before, year, after = time.localtime().tm_year, int(render("{{ strftime_now('%Y') }}")), time.localtime().tm_year
    assert before <= year <= after


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('no system\nrole') }}", "no system role"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ missing.more }}", "undefined"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% if %}", "not valid Jinja"),
        ("{{ 'x' | nothing }}", "not valid Jinja"),
    ],
)
def test_a_template_that_fails_gives_one_line(source: str, says: str) -> None:
    with pytest.raises(PromptError, match=says) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ([{"role": "user"}], "got role; allowed"),
        ([{}], "got none; allowed"),
        ([{"role": "user", "content": "a", "name": "b"}], "got content, name, role"),
        ([{"role": "", "content": "a"}], "role: got ''"),
        ([{"role": None, "content": "a"}], "role: got None"),
        ([{"role": "user", "content": None}], "content: got NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content: got list"),
        (["hi"], "message: got str"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        render(CHATML, messages)


def test_without_a_template_the_error_names_the_way_out() -> None:
    with pytest.raises(PromptError, match="--raw"):
        ChatTemplate(None).render(USER)


def test_the_template_is_compiled_once() -> None:
    template = ChatTemplate(CHATML)
    template.render(USER)
    compiled = template._template
    template.render(USER)
    assert template._template is compiled
