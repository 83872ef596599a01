"""Byte, ASCII and Hugging Face tokenizers (a tiny one, built here)."""

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from trace_jax.errors import UserError
from trace_jax.tokenizers import Tokenizer, load_tokenizer, prefix_problems

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>", "<|stop|>"]
PAD = {
    "__type": "AddedToken",
    "content": "<|pad|>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}
STABLE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DROPS_THINKING = STABLE.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content }}"
)
SYSTEM_TAIL = STABLE.replace("<|end|>\n", "{{ '(' ~ messages | length ~ ')' if m.role == 'system' else '' }}<|end|>\n")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}" + STABLE
NO_END = STABLE.replace("<|end|>", "")


def write_tokenizer(folder, template: str | None = STABLE, **config) -> str:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        ["count one two three"], trainers.BpeTrainer(vocab_size=280, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    raw.enable_padding(length=64)
    raw.enable_truncation(5)
    raw.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return str(folder)


@pytest.fixture
def jinja(require):
    """Chat templates need Jinja."""
    return require("jinja2")


@given(st.text())
def test_byte_round_trip(text):
    tokenizer = load_tokenizer("byte")
    ids = tokenizer.encode(text)
    assert all(0 <= token < 256 for token in ids)
    assert tokenizer.bos_id is not None
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text


@given(st.lists(st.integers(0, 258)))
def test_byte_decode_never_raises(ids):
    assert isinstance(load_tokenizer("byte").decode(ids), str)
    assert isinstance(load_tokenizer("ascii").decode([token for token in ids if token < 131]), str)


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_round_trip(text):
    tokenizer = load_tokenizer("ascii")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_code_unit_layout():
    for name, units in (("byte", 256), ("ascii", 128)):
        tokenizer = load_tokenizer(name)
        assert isinstance(tokenizer, Tokenizer)
        assert (tokenizer.name, tokenizer.vocab_size) == (name, units + 3)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (units, units + 1, units + 2)
        assert tokenizer.stop_ids == (units + 1,)
        assert tokenizer.apply_prompt("ab") == [units, 97, 98, 10]
        assert tokenizer.apply_prompt([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == [units, 97, 10, 98, 10]


def test_partial_utf8_becomes_the_replacement_character():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.decode(tokenizer.encode("h\u00e9")[:2]) == "h\ufffd"
    assert tokenizer.decode(tokenizer.encode("\ud800")) == "\ufffd" * 3


def test_ascii_names_the_character_it_cannot_encode():
    with pytest.raises(UserError, match=r"cannot encode '\u00e9' \(U\+00E9\) at character 1 of 'h\u00e9'; write tokenizer: byte"):
        load_tokenizer("ascii").encode("h\u00e9")


def test_hf_tokenizer(tmp_path, jinja):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (None, 0, 4, (0,))
    text = "count one two three, h\u00e9!"
    ids = tokenizer.encode(text)
    assert len(ids) > 5
    assert 4 not in ids
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode([1, *ids, 0, 4]) == text
    assert isinstance(tokenizer.decode([*range(tokenizer.vocab_size), tokenizer.vocab_size + 50]), str)
    assert tokenizer.apply_prompt("one") == tokenizer.encode("<|user|>\none<|end|>\n<|assistant|>\n")
    assert tokenizer.apply_prompt("one")[0] == 1


def test_hf_without_template_and_with_bos(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, None, bos_token="<|user|>", pad_token=None))
    assert tokenizer.apply_prompt("one") == [1, *tokenizer.encode("one\n")]
    assert tokenizer.pad_id == tokenizer.eos_id == 0


def test_hf_stop_ids_of_the_generation_config(tmp_path, jinja):
    path = write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    assert load_tokenizer(path).stop_ids == (0, 5)
    write_tokenizer(tmp_path, eos_token=None)
    assert load_tokenizer(path).eos_id == 5


def test_hf_template_files_lists_and_generation_tags(tmp_path, jinja):
    path = write_tokenizer(tmp_path, [{"name": "tools", "template": "no"}, {"name": "default", "template": STABLE}])  # type: ignore[arg-type]
    plain = load_tokenizer(path).apply_prompt("one")
    assert plain == load_tokenizer(path).encode("<|user|>\none<|end|>\n<|assistant|>\n")
    (tmp_path / "chat_template.jinja").write_text("{%- generation -%}\n  {{ messages[0].content | tojson }}<\n{%- endgeneration %}")
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.apply_prompt("\u00e9<")) == '"\u00e9<"<'


@pytest.mark.parity
def test_hf_prompts_equal_those_of_transformers(tmp_path, require, jinja):
    transformers = require("transformers")
    for template in (STABLE, DROPS_THINKING, SYSTEM_TAIL):
        path = write_tokenizer(tmp_path, template)
        tokenizer, peer = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
        for messages in (
            [{"role": "user", "content": "h\u00e9 <b>"}],
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ],
        ):
            expected = peer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            assert tokenizer.apply_prompt(messages) == list(expected)
        assert tokenizer.decode(peer.encode("count one")) == "count one"


@pytest.mark.parametrize(
    ("template", "problems"),
    [
        (STABLE, []),
        (NO_SYSTEM, []),
        (DROPS_THINKING, ["with a think block: the first answer is rendered differently"] * 2),
        (SYSTEM_TAIL, ["with a system message, .*: the first prompt is rendered differently"] * 2),
        (NO_END, ["no stop id follows the first answer"] * 4),
    ],
    ids=["stable", "no_system", "drops_thinking", "system_tail", "no_end"],
)
def test_tok_04_tok_05_prefix_stability(tmp_path, jinja, template, problems):
    found = prefix_problems(load_tokenizer(write_tokenizer(tmp_path, template)))
    assert len(found) == len(problems)
    assert all(re.search(pattern, text) for pattern, text in zip(problems, found, strict=True))


def test_tok_02_code_units_must_concatenate_ids():
    assert all("no stop id follows" in problem for problem in prefix_problems(load_tokenizer("byte")))
    assert len(prefix_problems(load_tokenizer("byte"))) == 4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not a directory; write byte, ascii or a directory"),
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "tokenizer.json cannot be read"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json is not a JSON object"),
        ({"tokenizer_config.json": "{}"}, "names no eos_token"),
        (
            {"tokenizer_config.json": '{"eos_token": "<|end|>", "chat_template": "{% if %}"}'},
            "tokenizer_config.json: the chat template is not valid",
        ),
        ({"chat_template.jinja": "{{ raise_exception('no') }}"}, "its chat template refuses the prompt"),
    ],
)
def test_bad_directories(tmp_path, jinja, files, message):
    if files:
        write_tokenizer(tmp_path)
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path / "missing") if files is None else str(tmp_path)).apply_prompt("one")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    path = write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match="the chat template of .* needs the package jinja2"):
        load_tokenizer(path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="needs the package tokenizers"):
        load_tokenizer(path)


def test_tasks_and_tokenizers_import_without_heavy_packages():
    code = (
        "import sys, trace_jax.tasks, trace_jax.tasks.worker, trace_jax.tokenizers, trace_jax.hf_tokenizer;"
        "sys.exit(str([n for n in ('jax', 'numpy', 'torch', 'transformers', 'sympy', 'reasoning_gym') if n in sys.modules]) if "
        "any(n in sys.modules for n in ('jax', 'numpy', 'torch', 'transformers', 'sympy', 'reasoning_gym')) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
