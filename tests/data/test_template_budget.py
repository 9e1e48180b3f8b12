"""A chat template that does more than it may with a document makes it no sample, soon and on every machine alike; it harms nothing else."""

from __future__ import annotations

import datetime
import pathlib
import time

import pytest
from foreign import answers
from tiny_tokenizer import PLAIN, save_tokenizer

from pipetrain.data import chat_template
from pipetrain.data.chat_template import ChatTemplate, SampleRefused

CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
SECONDS = 30.0  # a template that uses its budget up takes two or three

WORK = "it takes too many steps"
SIZE = "it makes a value of more than 1,048,576 characters"
BITS = "a number has more than 4096 bits"
WIDTH = "width"
LOOP = "{% for a in range(1000) %}"
ATTACKS = {
    "power": ("{{ 9**(9**9) }}", BITS),
    "product": ("{% set n = namespace(v=9) %}" + LOOP + "{% set n.v = n.v * n.v %}{% endfor %}", BITS),
    "nested ranges": (5 * LOOP + "x" + 5 * "{% endfor %}", WORK),
    "nested lists": (8 * "{% for a in [1,2,3,4,5,6,7,8,9,0] %}" + 8 * "{% endfor %}", WORK),
    "nested messages": ("{% set m = messages * 10 %}" + 6 * "{% for a in m %}" + 6 * "{% endfor %}", WORK),
    "one by one": ("{{ range(100000)" + 40 * "|map('string')" + "|list|length }}", WORK),
    "repeated": ("{{ 'a' * 10**11 }}", SIZE),
    "repeated list": ("{{ ([0] * 10**9)|length }}", SIZE),
    "doubled": ("{% set n = namespace(v='a') %}" + LOOP + "{% set n.v = n.v + n.v %}{% endfor %}", SIZE),
    "joined": ("{% set n = namespace(v='a') %}" + LOOP + "{% set n.v = n.v ~ n.v %}{% endfor %}", SIZE),
    "in each other": ("{% set n = namespace(v=[]) %}" + LOOP + "{% set n.v = [n.v, n.v] %}{% endfor %}", WORK),
    "replaced": ("{{ ('a'*1000)|replace('a', 'b'*10000) }}", SIZE),
    "replaced by method": ("{{ ('a'*1000).replace('', 'b'*10000) }}", SIZE),
    "joined by much": ("{{ range(100000)|join('a'*100000) }}", SIZE),
    "joined by method": ("{{ ('a'*100000).join(('a'*100000)|list) }}", SIZE),
    "format": ("{{ '%99999999d' % 1 }}", WIDTH),
    "format by value": ("{{ '%*d' % (99999999, 1) }}", WIDTH),
    "format of many": ("{{ ('%(a)s'*10000) % {'a': 'a'*100000} }}", SIZE),
    "format method": ("{{ '{:99999999}'.format(1) }}", WIDTH),
    "format method by value": ("{{ '{:{}}'.format(1, 99999999) }}", WIDTH),
    "format filter": ("{{ '%99999999d'|format(1) }}", WIDTH),
    "padded": ("{{ 'a'.ljust(10**10) }}", WIDTH),
    "indented": ("{{ messages|tojson(indent=10**10) }}", WIDTH),
    "bytes": ("{{ (5).to_bytes(10**10) }}", WIDTH),
    "rounded": ("{{ 5|round(10**10, 'ceil') }}", WIDTH),
    "output": (LOOP + 1000 * "a" + "{{ 'a' * 1000 }}{% endfor %}", SIZE),
    "text": (LOOP + LOOP + 100 * "a" + "{% endfor %}{% endfor %}", SIZE),
    "constant": (LOOP + LOOP + "{{ '" + 100 * "a" + "' }}{% endfor %}{% endfor %}", SIZE),
    "compared": (LOOP + LOOP + "{{ 'a'*100000 == 'a'*99999 ~ 'b' }}{% endfor %}{% endfor %}", WORK),
    "sliced": ("{% set t = 'a'*1000000 %}" + LOOP + LOOP + "{% set s = t[1:] %}{% endfor %}{% endfor %}", WORK),
    "a macro that calls itself": ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "more than 50 calls"),
    "and twice": (
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        WORK,
    ),
    "a loop that calls itself": ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "more than 50 calls"),
    "division": ("{{ 1 // 0 }}", "division"),
    "an own error": ("{{ raise_exception('a\x1b[2J\n' ~ 'b'*1000) }}", r"a\x1b[2J"),
    "a word of lorem ipsum": ("{{ lipsum(n=1000000) }}", "lipsum"),
    "chance": ("{{ [1, 2]|random }}", "random"),
    "Python": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "deep": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
}


def template_of(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>"}, "theirs", "all", datetime.date(2024, 5, 31))


@pytest.mark.parametrize("name", ATTACKS)
def test_what_goes_over_the_budget_is_no_sample(name: str) -> None:
    text, says = ATTACKS[name]
    started = time.monotonic()
    with pytest.raises(SampleRefused) as refused:
        template_of(text).render(CHAT)
    assert time.monotonic() - started < SECONDS
    said = str(refused.value).replace("\x1b", r"\x1b")
    assert said.startswith("the chat template of theirs does not take it (")
    assert says in said
    assert len(said) < 300
    assert "\n" not in said


def test_a_document_has_a_budget_of_its_own() -> None:
    template = template_of("{% for m in messages %}" + LOOP + "{{ m.content[:1] }}{% endfor %}{% endfor %}")
    first = template.render(CHAT)
    assert first == 1000 * "W" + 1000 * "B"
    for _ in range(20):
        assert template.render(CHAT) == first


def test_a_long_chat_may_be_looked_at_from_each_message() -> None:
    """As templates do that look for the last question."""
    text = "{% for m in messages %}{% for o in messages[loop.index0:] %}{% if o.role == 'x' %}!{% endif %}{% endfor %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": 5_000 * "a"}] * 400
    assert len(template_of(text).render({"messages": messages})) == 400 * 5_000


def test_what_templates_of_chat_models_do_stays_as_it_is() -> None:
    text = (
        "{%- set ns = namespace(found=false, n=0) -%}{{- bos_token -}}{%- if tools is defined and tools -%}{{ tools|tojson(indent=2) }}{%- endif -%}"
        "{%- macro shown(m, first=true) -%}<{{ m['role']|upper }}>{{ m.content.strip()|replace('?', '!') ~ ('' if first else '.') }}{%- endmacro -%}"
        "{%- for m in messages if m.role in ['user', 'assistant'] -%}{%- set ns.n = ns.n + 1 -%}{{- shown(m, first=loop.first) -}}{%- else -%}none{%- endfor -%}"
        "{{- messages|map(attribute='role')|join(', ') -}}{{- messages|selectattr('role', 'equalto', 'user')|list|length -}}"
        "{%- for key, value in messages[0].items() -%}{{ '%s=%s;' % (key, value) }}{%- endfor -%}{{ '{}/{}'.format(ns.n, messages|length) }}"
        "{{- messages[::-1][0].content.split('.')[0] -}}{{- messages[-1]['content'].startswith('Be') -}}{{ strftime_now('%d %b %Y') }}"
    )
    assert template_of(text).render(CHAT) == (
        "<s><USER>Why!<ASSISTANT>Because..user, assistant1role=user;content=Why?;2/2BecauseTrue31 May 2024"
    )


def words_to_tokenize(folder: pathlib.Path, harm: str) -> list[str]:
    """Of three chats in a.jsonl, the second of which meets `harm` in the template."""
    tokenizer = save_tokenizer(folder / "tokenizer", f"{{% if messages|length > 2 %}}{harm}{{% endif %}}" + PLAIN)
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    (folder / "a.jsonl").write_text(good + good.replace("[{", '[{"role": "user", "content": "c"}, {') + good)
    return ["tokenize", str(folder / "a.jsonl"), f"data.tokenizer={tokenizer}", "data.assistant_only_loss=false"]


def test_the_command_names_the_line_and_goes_on_where_it_may(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_to_tokenize(tmp_path, "{{ 'a' * 10**11 }}")
    code, told = answers(capsys, *words, f"--out={tmp_path / 'tokens'}")
    assert code == 2
    assert f"{tmp_path / 'a.jsonl'}:2: the chat template of {tmp_path / 'tokenizer'} does not take it ({SIZE})" in told
    code, told = answers(capsys, *words, "data.on_error=skip", f"--out={tmp_path / 'tokens'}")
    assert code == 0
    assert "1 were skipped, the first: " in told


def test_time_ends_the_command_and_skips_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.0)
    words = words_to_tokenize(tmp_path, LOOP + 5 * "{{ messages }}" + "{% endfor %}")
    code, told = answers(capsys, *words, "data.on_error=skip", f"--out={tmp_path / 'tokens'}")
    assert code == 2
    assert f"{tmp_path / 'a.jsonl'}:2: its chat template takes more than 0 s; leave it out" in told
    assert not (tmp_path / "tokens").exists()
