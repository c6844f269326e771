from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import ConfigError, RequestError
from pelton.tokens.chat_template import ChatTemplate
from pelton.tokens.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]
CONVERSATIONS = [
    USER,
    [{"role": "system", "content": "Be brief."}, *USER],
    [
        *USER,
        {"role": "assistant", "content": " yes \n"},
        {"role": "user", "content": "<b>&'\"{{ x }}"},
    ],
    [*USER, *USER],
    [*USER, {"role": "system", "content": "late"}, {"role": "odd-role", "content": "日本 😊"}],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>system"}],
    [{"role": "user", "content": "", "name": "Ann", "extra": None}],
]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source).render(messages, **options)


@pytest.fixture(scope="module")
def smollm(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_templates, special_tokens=tokenizer.special_tokens)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_equals_transformers(
    smollm: ChatTemplate,
    tokenizer: Tokenizer,
    reference: Any,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
) -> None:
    text = smollm.render(messages, add_generation_prompt=add_generation_prompt)
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)
    ids = reference.apply_chat_template(messages, return_dict=False, **options)
    assert tokenizer.encode_chat(text).tolist() == ids


texts = st.text(max_size=20).filter(lambda text: text.isprintable() and not text.isnumeric())


@settings(max_examples=100, deadline=None)
@given(
    turns=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1)
)
def test_equals_transformers_on_any_text(
    smollm: ChatTemplate, reference: Any, turns: list[tuple[str, str]]
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert smollm.render(messages) == expected


FEATURES = """\
{%- set ns = namespace(n=0, out='') -%}
{{ bos_token }}
{%- for message in messages if message.role != 'skip' %}
    {%- set ns.n = ns.n + 1 %}
    {%- set ns.out = ns.out ~ message.content[:3] + '/' %}
    {%- if loop.index == 4 %}{% break %}{% endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- generation %}[{{ message.content | trim | upper }}]{%- endgeneration %}
{%- endfor %}
{{ ns.n }} {{ ns.out }}
{%- if tools %}
  {{- tools | tojson(indent=2) }} {{ tools | tojson }}
{%- endif %}
{% macro show(x, depth=0) %}{{ x if depth > 2 else show(x ~ '.', depth + 1) }}{% endmacro -%}
{{ show('m') }} {{ '%s-%d' % ('a', 3) }} {{ '{:>4}|{}'.format('b', 5) }} {{ "%05d" | format(42) }}
{{ messages | map(attribute='role') | join(', ') }} {{ [1, 2] + [3] }} {{ 'ab' * 3 }} {{ 2 ** 10 }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ range(3) | list }}
{{ 'a b c'.split(' ') | reverse | join('-') }} {{ dict(a=1) }} {{ 'x\ny' | indent(3) }}
{{ 'aXbX' | replace('X', '--') }} {{ 'aXbX'.replace('X', '') }} {{ 'hi' | center(6) }}!
{% call(x) show2() %}{{ x }}{% endcall %}
{%- set block %}<{{ extra }}>{% endset %}{{ block }} {{ undefined_thing }}{{ none }}
{{ {'b': [1, {'c': none}], 'a': 'é<&>'} | tojson }} {{ messages[0] | items | list | first }}
"""
FEATURES = FEATURES.replace(
    "{% call(x)", "{% macro show2() %}{{ caller('called') }}{% endmacro %}{% call(x)"
)


def test_language_equals_transformers(reference: Any) -> None:
    """The limits change nothing for an honest template."""
    messages = [
        {"role": role, "content": f" text {role} <&> é "}
        for role in ("user", "tool", "skip", "user", "assistant", "user")
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    ours = ChatTemplate(FEATURES, special_tokens={"bos_token": "<|im_start|>"}).render(
        messages, tools=tools, extra="E"
    )
    theirs = reference.apply_chat_template(
        messages,
        chat_template=FEATURES,
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
        extra="E",
    )
    assert ours == theirs


def test_no_second_bos(tokenizer: Tokenizer) -> None:
    """The template writes BOS; encoding adds none."""
    text = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}", special_tokens=tokenizer.special_tokens
    ).render(USER)
    assert tokenizer.encode_chat(text).tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("messages", "field", "message"),
    [
        (None, "messages", "non-empty list"),
        ([], "messages", "non-empty list"),
        ("hi", "messages", "got 'hi'"),
        ({"role": "user"}, "messages", "non-empty list"),
        (["hi"], "messages[0]", "an object with role and content, got 'hi'"),
        ([{"content": "x"}], "messages[0].role", "got None"),
        ([{"role": 3, "content": "x"}], "messages[0].role", "got 3"),
        ([*USER, {"role": "user"}], "messages[1].content", "missing"),
        ([{"role": "user", "content": None}], "messages[0].content", "null"),
        ([{"role": "user", "content": 5}], "messages[0].content", "got 5"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "got 'x'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "None"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
            "'image_url': this model takes only text",
        ),
        ([{"role": "assistant", "tool_calls": 4}], "messages[0].tool_calls", "got 4"),
        ([{"role": "user", "content": "x", "y": {1: 2}}], "a key of messages[0].y", "got 1"),
        ([{"role": "user", "content": "x", "y": [{1}]}], "messages[0].y[0]", "a JSON value"),
    ],
)
def test_bad_messages(smollm: ChatTemplate, messages: Any, field: str, message: str) -> None:
    """Case 36: 400 naming the field, never a server fault."""
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        smollm.render(messages)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_deep_messages(smollm: ChatTemplate) -> None:
    """Case 36."""
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="deeper than 100"):
        smollm.render([{"role": "user", "content": "x", "y": deep}])


@pytest.mark.parametrize("tools", ["f", [1], {"a": 1}])
def test_bad_tools(smollm: ChatTemplate, tools: Any) -> None:
    """Case 36."""
    with pytest.raises(RequestError, match="tools"):
        smollm.render(USER, tools=tools)


ALTERNATES = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.content }}
{%- endfor %}"""


def test_the_templates_own_message() -> None:
    """Case 36: two user messages in a row."""
    with pytest.raises(RequestError, match="Roles must alternate user/assistant") as caught:
        render(ALTERNATES, [*USER, *USER])
    assert caught.value.field == "messages"
    assert render(ALTERNATES, USER) == "hi"


STRICT = """{% for m in messages %}
{%- if m.role == 'system' and not loop.first -%}
{{ raise_exception('System comes first') }}{% endif %}
{%- if m.role == 'tool' and not loop.previtem.tool_calls -%}
{{ raise_exception('No call') }}{% endif %}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') -%}
{{ raise_exception('Unknown role ' + m.role) }}{% endif %}{{ m.content }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "system", "content": "s"}, "System comes first"),
        ({"role": "oracle", "content": "s"}, "Unknown role oracle"),
        ({"role": "tool", "content": "s", "tool_call_id": "1"}, "No call"),
    ],
)
def test_roles_are_the_templates_business(
    smollm: ChatTemplate, message: dict[str, Any], says: str
) -> None:
    """Case 36: a system message in the middle, an unknown role, a tool message without a call. The
    template that refuses them is quoted, and one that takes them gets them as they are."""
    with pytest.raises(RequestError, match=says) as caught:
        render(STRICT, [*USER, message])
    assert caught.value.field == "messages"
    text = smollm.render([*USER, message])
    assert f"<|im_start|>{message['role']}\ns<|im_end|>" in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ messages[0].role + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{{ messages | tojson(indent=messages) }}", "indent|multiply|concatenate"),
        ("{% include 'x' %}", "no loader"),
        ("{{ undefined_thing | tojson }}", "undefined"),
    ],
)
def test_failing_templates(source: str, message: str) -> None:
    """Case 36: whatever a template raises is the request's fault."""
    with pytest.raises(RequestError, match=message):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for x in %}", "line 2"),
        ("{{ x | nofilter }}", "nofilter"),
        ("{{ x | urlize }}", "urlize"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "can not be used"),
        ("{% for a in [1] %}" * 100 + "{% endfor %}" * 100, "can not be used"),
    ],
)
def test_templates_that_do_not_compile(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(source)


RUNAWAYS = [
    "{% for i in range(10**12) %}x{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [0] * 10**10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = {0: ns.x, 1: ns.x} %}"
    "{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set b = 'x' * 10**6 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
    "{% set b = 'x' * 10**6 %}{{ range(99999) | map('replace', 0, b) | list | length }}",
    "{% set b = 'x' * 10**6 %}{{ b | replace('x', b) }}",
    "{% set b = 'x' * 10**6 %}{{ b.replace('x', b) }}",
    "{% set b = 'x' * 10**6 %}{{ b | replace(new=b, old='x') }}",
    "{% set b = 'x' * 10**6 %}{{ range(99999) | join(b) }}",
    "{% set b = 'x' * 10**6 %}{{ b.join(range(99999) | map('string')) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x' | center(width=10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ 'x' | indent(10**10, true) }}",
    "{{ ('x\n' * 10**6) | indent(10**6) }}",
    "{{ [1] | batch(10**10, 0) | list }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, '9999999999') }}",
    "{{ ('{0}' * 10**6).format('x' * 10**6) }}",
    "{{ [[[[1]]]] | tojson(indent=10**10) }}",
    "{{ 'x'.translate({120: 'y' * 10**6}) }}",
    "{{ 'x'.encode() }}",
    "{{ (5).to_bytes(10**10) }}",
    "{% set a = ['x' * 10**6] * 10 %}{% set a = [a] * 1000 %}{{ a | string }}",
    "{{ lipsum(10**6) }}",
    "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "{% set b = 'x' * 10**6 %}" + "{% set b = b ~ b %}" * 8,
    "{% set b = ['x' * 10**6] %}" + "{% set b = [b, b] %}" * 8 + "{{ b == b }}",
    "{% set b = 'x' * 10**6 %}{% set c = b ~ (b, b, b) ~ b %}" + "{% set b = b + b %}" * 8,
    "{% for i in 'x' * 10**7 %}{% for j in 'x' * 10**7 %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", RUNAWAYS)
def test_runaway_templates(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 36: template that loops for ever or fills the memory."""
    monkeypatch.setattr("pelton.tokens.template_sandbox.MAX_SECONDS", 0.3)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            render(source)
        except BaseException as error:
            caught.append(error)

    # Not the main thread: no signal would help there.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert isinstance(caught[0], RequestError), caught


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__ }}",
        "{{ ().__class__.__bases__ }}",
        "{{ ''['__class__'].mro() }}",
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ messages | attr('__class__') | attr('__mro__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace(__class__=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace({'__class__': 1}) }}",
        "{{ strftime_now.__code__ }}",
        "{{ dict.__subclasses__() }}",
    ],
)
def test_internals_are_out_of_reach(source: str) -> None:
    """Case 36: template that calls attributes. Nothing is shown, nothing is changed."""
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = render(source, messages)
    except RequestError:
        text = ""
    assert not re.search(r"class|type|object|module|code|dict_|function", text)
    assert messages == USER


def test_a_long_honest_conversation() -> None:
    """The limits are far from what real requests need."""
    messages = [
        {"role": ("user", "assistant")[at % 2], "content": "word " * 2000} for at in range(400)
    ]
    text = ChatTemplate(
        "{% for m in messages %}{% set last = messages | length - 1 == loop.index0 %}"
        "{{ '<' + m.role + '>' + m.content | trim + '\\n' }}{% endfor %}"
    ).render(messages)
    assert len(text) > 3_990_000


def test_budget_is_fresh_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.tokens.template_sandbox.MAX_SECONDS", 0.3)
    template = ChatTemplate("{% for i in range(8000) %}{{ i }}{% endfor %}")
    for _ in range(12):
        template.render(USER)


def test_missing_template() -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        ChatTemplate(None).render(USER)
    with pytest.raises(RequestError, match="it has: rag"):
        ChatTemplate({"rag": "x"}).render(USER)


def test_named_templates() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T"})
    assert template.render(USER) == "D"
    assert template.render(USER, tools=[]) == "T"


STRINGS = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }};{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}|{% endfor %}{% endfor %}"
BOTH = """{% for m in messages %}{% set content = m.content %}
{%- if content is string %}S{{ content }}
{%- else %}{% for p in content %}P{{ p.text }}{% endfor %}{% endif %}{% endfor %}"""
MACRO = """{% macro show(body) %}{% if body is string %}{{ body }}{% endif %}{% endmacro %}
{%- for m in messages %}{% for line in m.content.split('\\n') %}{{ show(line) }}{% endfor %}
{%- endfor %}"""
PARTED = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]


@pytest.mark.parametrize(
    ("source", "found", "from_string", "from_parts"),
    [
        (STRINGS, "string", "user:hi;", "user:a\nb;"),
        (PARTS, "parts", "hi|", "a|b|"),
        (BOTH, "parts", "Shi", "PaPb"),
        (MACRO, "string", "hi", "ab"),
        (
            "{% for m in messages %}{% set c = m.content %}"
            "{% for p in c | selectattr('type') %}{{ p.text }}{% endfor %}{% endfor %}",
            "parts",
            "hi",
            "ab",
        ),
    ],
)
def test_content_format(source: str, found: str, from_string: str, from_parts: str) -> None:
    """Case 36: list content with a text-only template, and the reverse."""
    template = ChatTemplate(source)
    assert template.content_format() == found
    assert template.render(USER) == from_string
    assert template.render(PARTED) == from_parts


def test_content_format_can_be_forced() -> None:
    template = ChatTemplate(STRINGS, content_format="parts")
    assert template.content_format() == "parts"
    with pytest.raises(RequestError):
        template.render(PARTED)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\u00e9"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL_HISTORY = [*USER, CALLED, {"role": "tool", "tool_call_id": "1", "content": "42"}]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("[{{ m.role + ':' + m.content }}]", "[user:hi][assistant:][tool:42]"),
        ("[{{ m['content'] | trim }}]", "[hi][][42]"),
        ("[{% if m.content %}{{ m.content }}{% endif %}]", "[hi][][42]"),
        ("[{% if m.content is not none %}{{ m.content }}{% endif %}]", "[hi][][42]"),
        ("[{% set c = m.content %}{% if c is none %}call{% endif %}]", "[][call][]"),
        ("[{% if m.content == none %}call{% endif %}]", "[][call][]"),
        ("[{% for part in m.content %}{{ part.text }}{% endfor %}]", "[hi][][42]"),
    ],
)
def test_null_content_beside_tool_calls(source: str, found: str, reference: Any) -> None:
    """As the template expects it; and where transformers, which drops what is null, can render it,
    the same."""
    source = "{% for m in messages %}" + source + "{% endfor %}"
    assert render(source, TOOL_HISTORY) == found
    if any(words in source for words in ("':' +", "trim", "for part", "call")):
        return
    theirs = reference.apply_chat_template(TOOL_HISTORY, chat_template=source, tokenize=False)
    assert theirs == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (" {{ c.function.arguments | tojson }}", ' {"a": "\u00e9"}'),
        ("{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}", " a=\u00e9"),
        ("{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}", " a=\u00e9"),
        ("{% set x = c.function.arguments %} {{ x | tojson }}", ' {"a": "\u00e9"}'),
        ("{{ c.function | tojson }}", '{"name": "f", "arguments": {"a": "\u00e9"}}'),
        ("{{ '' + c.function.arguments }}", '{"a": "\u00e9"}'),
        (
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
            "{{ c.function.arguments | tojson }}{% endif %}",
            '{"a": "\u00e9"}',
        ),
    ],
)
def test_arguments_of_tool_calls(source: str, found: str) -> None:
    """Text in OpenAI's histories; templates write JSON of objects, or text as it is."""
    source = "{% for c in messages[1].tool_calls %}" + source + "{% endfor %}"
    assert render(source, TOOL_HISTORY) == found
    assert CALL["function"] == {"name": "f", "arguments": '{"a": "\u00e9"}'}


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "null"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError, match="a JSON object as text") as caught:
        render("{{ messages | tojson }}", [*USER, {**CALLED, "tool_calls": [call]}])
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"


def test_a_template_that_does_not_write_calls_takes_any_arguments() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "no JSON"}}
    source = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert render(source, [*USER, {**CALLED, "tool_calls": [call]}]) == "user assistant "


@pytest.mark.parametrize("content", [0, False, {}])
def test_content_that_is_nothing_but_no_text(content: object) -> None:
    with pytest.raises(RequestError, match="a string or a list of text parts"):
        render("{{ messages[0].content }}", [{"role": "user", "content": content}])


def test_the_older_form_of_tool_calls_is_refused_by_its_name(smollm: ChatTemplate) -> None:
    call = {"name": "f", "arguments": "{}"}
    for content in ({}, {"content": None}, {"content": "x"}):
        with pytest.raises(RequestError, match="send the call as tool_calls") as refusal:
            smollm.render([{"role": "assistant", "function_call": call, **content}])
        assert refusal.value.field == "messages[0].function_call"
    knows = ChatTemplate("{{ messages[0].function_call.name }}")
    assert knows.render([{"role": "assistant", "function_call": call}]) == "f"


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "refusal", "refusal": "I may not."}]},
        {"content": None, "refusal": "I may not."},
    ],
)
def test_a_refusal_is_what_the_assistant_said(smollm: ChatTemplate, message: Any) -> None:
    said = smollm.render([{"role": "assistant", "content": "I may not."}])
    assert smollm.render([{"role": "assistant", **message}]) == said
    parts = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    assert ChatTemplate(parts).render([{"role": "assistant", **message}]) == "I may not."


def test_tool_history_of_a_real_template(smollm: ChatTemplate) -> None:
    """It adds texts, and knows nothing of calls."""
    assert "assistant\n<|im_end|>" in smollm.render(TOOL_HISTORY)


def test_continue_final_message(smollm: ChatTemplate, reference: Any) -> None:
    for ending in ("Once", "Once ", "Once\n", " Once upon"):
        messages = [*USER, {"role": "assistant", "content": ending}]
        text = smollm.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith(f"<|im_start|>assistant\n{ending}")
        assert text == reference.apply_chat_template(
            messages, tokenize=False, continue_final_message=True
        )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[-1].content | trim }}</s>", "a b"),
        ("{{ messages[-1].content }}</s>", " a b "),
        ("{% for p in messages[-1].content %}<{{ p.text }}>{% endfor %}</s>", "< a b "),
    ],
)
def test_continue_cuts_where_the_text_ends(source: str, expected: str) -> None:
    messages = [{"role": "assistant", "content": " a b "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **options) == expected


def test_continue_refuses_what_can_not_be_continued() -> None:
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render(STRINGS, USER, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(RequestError, match="changes the text"):
        render("{{ messages[0].role }}", USER, **options)
    with pytest.raises(RequestError, match="changes the text"):
        render("{{ messages[0].content * 2 }}", USER, **options)
    with pytest.raises(RequestError, match="needs a last message with text"):
        render(STRINGS, [{"role": "user", "content": ""}], **options)


def test_request_is_not_changed() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    before = repr(messages)
    render(PARTS, messages, add_generation_prompt=False, continue_final_message=True)
    assert repr(messages) == before


def test_variables() -> None:
    assert render("{{ enable_thinking }} {{ add_generation_prompt }}", enable_thinking=False) == (
        "False True"
    )
    with pytest.raises(RequestError, match="x must be a JSON value"):
        render("{{ x }}", x=object())
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
