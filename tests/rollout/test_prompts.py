"""Requests made of task rows, and rewards of finished sequences."""

from __future__ import annotations

import numpy as np
import pytest

from trace_jax.errors import UserError
from trace_jax.rollout import Trajectories
from trace_jax.rollout.prompts import SamplingSettings, answer_texts, make_requests, sample_seed, score
from trace_jax.tasks import Row, Task
from trace_jax.tasks.verifiers import VerifierSpec
from trace_jax.tokenizers import load_tokenizer

ASCII = load_tokenizer("ascii")
ROWS = [Row(70, "a", "1"), Row(71, "bc", "2"), Row(72, "d", "3")]
SETTINGS = SamplingSettings(max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=-1)


def requests(**changes):
    options = {"group_size": 4, "first_sample": 100, "seed": 3} | changes
    return make_requests(ROWS, ASCII, changes.pop("settings", SETTINGS), **{k: v for k, v in options.items() if k != "settings"})


def finished(*answers: str) -> Trajectories:
    """Sequences "ab\\n" + answer, of which the answer and the end token are sampled."""
    prompt = ASCII.apply_prompt("ab")
    tokens = [[*prompt, *ASCII.encode(answer), ASCII.eos_id] for answer in answers]
    sampled = [[False] * len(prompt) + [True] * (len(ids) - len(prompt)) for ids in tokens]
    flat, count = np.concatenate(tokens).astype(np.int32), len(answers)
    return Trajectories(
        offsets=np.cumsum([0, *map(len, tokens)]).astype(np.int64),
        tokens=flat,
        sampled=np.concatenate(sampled),
        logprobs=np.zeros(flat.size, np.float32),
        weight_version=np.zeros(flat.size, np.int32),
        sample_id=np.arange(count, dtype=np.uint64),
        prompt_id=np.arange(count, dtype=np.uint64),
        group=np.zeros(count, np.int64),
        attempt=np.zeros(count, np.uint16),
        temperature=np.ones(count, np.float32),
        finish_reason=np.zeros(count, np.uint8),
        reward=np.full(count, np.nan, np.float32),
    )


def test_a_group_of_requests_per_row():
    made = requests()
    assert [request.sample_id for request in made] == list(range(100, 112))
    assert [request.group for request in made] == [100] * 4 + [104] * 4 + [108] * 4
    assert [request.prompt_id for request in made] == [70] * 4 + [71] * 4 + [72] * 4
    assert made[5].tokens.tolist() == ASCII.apply_prompt("bc")
    assert {(r.max_new_tokens, r.temperature, r.top_p, r.stop_token_ids) for r in made} == {(5, 0.7, 0.9, (ASCII.eos_id,))}


@pytest.mark.parametrize(("setting", "request_value"), [(-1, 0), (0, 0), (7, 7)])
def test_top_k_minus_one_keeps_all(setting, request_value):
    assert {request.top_k for request in requests(settings=SamplingSettings(5, top_k=setting))} == {request_value}


def test_seeds_follow_from_the_run_and_the_sample_alone():
    made, again, other = requests(), requests(first_sample=104), requests(seed=4)
    assert [r.seed for r in made[4:]] == [r.seed for r in again[:8]]
    assert not {r.seed for r in made} & {r.seed for r in other}
    assert [sample_seed(0, 0), sample_seed(0, 1)] == [0xE220A8397B1DCDAF & 0xFFFFFFFF, 0x6E789E6AA1B965F4 & 0xFFFFFFFF]
    assert len({sample_seed(seed, sample) for seed in range(20) for sample in range(1000)}) > 19_900


@pytest.mark.parametrize(("audited", "chosen"), [(0, []), (1, [0]), (3, [0, 4, 8]), (12, list(range(12)))])
def test_audited_requests_are_spread_over_the_prompts(audited, chosen):
    assert [index for index, request in enumerate(requests(audited=audited)) if request.audit] == chosen


def test_a_prompt_beyond_the_limit_is_named():
    limit = len(ASCII.apply_prompt("bc"))
    assert len(requests(settings=SamplingSettings(5, max_prompt_tokens=limit))) == 12
    with pytest.raises(UserError, match=r"prompt 71 has 4 tokens, more than rollout.max_prompt_tokens=3; raise it or filter"):
        requests(settings=SamplingSettings(5, max_prompt_tokens=limit - 1))


def test_answers_are_the_sampled_tokens_without_the_end():
    assert answer_texts(finished("xy", "", "z"), ASCII) == ["xy", "", "z"]


def test_scores_of_answers():
    task = Task("t", {}, reward="char_match", verifier=None)
    scored = score(finished("abcd", "abxx", ""), [Row(0, "q", "abcd")] * 3, task, ASCII)
    np.testing.assert_array_equal(scored.reward, np.asarray([1, 0.25, 0], np.float32))
    np.testing.assert_array_equal(scored.correct, [True, False, False])
    np.testing.assert_array_equal(scored.trajectories.reward, scored.reward)
    assert scored.verifier_errors == 0


def test_tok_01_tok_03_scoring_never_tokenizes_again():
    """Half a UTF-8 character: its text has other ids than those sampled, and those sampled are what is trained on."""
    tokenizer, batch = load_tokenizer("byte"), finished("ab")
    batch = batch.replace(tokens=np.where(batch.tokens == ord("b"), 0xC3, batch.tokens).astype(np.int32))
    (text,) = answer_texts(batch, tokenizer)
    assert tokenizer.encode(text) != batch.tokens[batch.sampled][:-1].tolist()
    scored = score(batch, [Row(0, "q", text)], Task("t", {}, reward="exact", verifier=None), tokenizer)
    assert scored.correct.all()
    np.testing.assert_array_equal(scored.trajectories.tokens, batch.tokens)
    np.testing.assert_array_equal(scored.trajectories.sampled, batch.sampled)


def test_rew_01_an_answer_without_a_verdict_has_no_reward(tmp_path, monkeypatch, capfd):
    (tmp_path / "half_reward.py").write_text("def reward(completion, answer, row):\n    return 1 / float(completion)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = VerifierSpec("half_reward:reward")
    with Task("t", {}, reward=spec.name, verifier=spec, workers=1) as task:
        scored = score(finished("0", "1", "4"), [Row(0, "q", "")] * 3, task, ASCII)
        np.testing.assert_array_equal(scored.reward, np.asarray([np.nan, 1, 0.25], np.float32))
        np.testing.assert_array_equal(scored.correct, [False, True, False])
        assert scored.verifier_errors == 1
        assert "half_reward:reward failed on the prompt 'q': ZeroDivisionError" in capfd.readouterr().err
        with pytest.raises(UserError, match="3 batches in a row"):
            for _ in range(3):
                score(finished("0"), [Row(0, "q", "")], task, ASCII)
