"""`trace-jax import` stores a tokenizer whose ids the model has, or refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from trace_jax.errors import UserError
from trace_jax.evaluation.open_policy import open_policy
from trace_jax.models.hf import CARRIED_FILES
from trace_jax.tokenizers import load_tokenizer
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.import_checkpoint import import_hf_checkpoint


def write_tokenizer(folder: Path, size: int) -> None:
    """A word tokenizer with `size` ids."""
    raw = Tokenizer(models.WordLevel({"<end>": 0, **{f"w{number}": number for number in range(1, size)}}, unk_token="<end>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


@pytest.mark.parametrize(("vocabulary", "tokenizer"), [(300, "byte"), (259, "byte"), (258, "ascii"), (131, "ascii")])
def test_without_a_tokenizer_a_built_in_one_that_fits(
    make_checkpoint: Callable[..., Any], tmp_path: Path, vocabulary: int, tokenizer: str
) -> None:
    source = make_checkpoint(vocab_size=vocabulary).path
    assert import_hf_checkpoint(source, tmp_path / "out")["tokenizer"] == tokenizer
    assert load_policy(tmp_path / "out").tokenizer == tokenizer


def test_a_vocabulary_that_no_built_in_tokenizer_fits_is_refused(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    source = make_checkpoint(vocab_size=128).path
    with pytest.raises(UserError, match=r"ascii \(131 tokens\) exceed its vocab_size of 128; put the model's tokenizer.json there"):
        import_hf_checkpoint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]
    write_tokenizer(source, 128)  # the remedy
    tokenizer = import_hf_checkpoint(source, tmp_path / "out")["tokenizer"]
    assert tokenizer == str(tmp_path / "out" / "tokenizer") and load_tokenizer(tokenizer).vocab_size == 128


def test_a_tokenizer_larger_than_the_model_is_refused(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    source = make_checkpoint(vocab_size=128).path
    write_tokenizer(source, 129)
    with pytest.raises(UserError, match=r"tokenizer.json has 129 tokens, but config.json a vocab_size of 128"):
        import_hf_checkpoint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_a_moved_or_copied_checkpoint_opens_with_its_own_tokenizer(
    make_checkpoint: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(vocab_size=128).path
    write_tokenizer(source, 128)
    monkeypatch.chdir(tmp_path)
    import_hf_checkpoint(source, Path("out"))
    shutil.rmtree(source)
    shutil.copytree("out", "copies/first")
    shutil.move("out", "moved")
    task = ("task.name=reasoning_gym:spell_backward", "task.params={min_word_len: 3, max_word_len: 3, size: 20}")
    for place in ("moved", "copies/first", "copies/first/checkpoints", "copies/first/checkpoints/0", tmp_path / "moved"):
        opened = open_policy(Path(place), task)
        assert load_tokenizer(opened.config.tokenizer).vocab_size == 128
        opened.task.close()


def test_every_tokenizer_and_generation_file_is_carried(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    source = make_checkpoint(vocab_size=128).path
    write_tokenizer(source, 128)
    for name in CARRIED_FILES:
        if not (source / name).exists():
            (source / name).write_text("{}")
    import_hf_checkpoint(source, tmp_path / "out")
    copied = {file.name: file.read_bytes() for file in (tmp_path / "out" / "tokenizer").iterdir()}
    assert copied == {name: (source / name).read_bytes() for name in CARRIED_FILES}
