"""What every rollout engine must do for the tiny policy: tests that an engine's module subclasses.

A module gives the class a fixture `engine`, module-wide, with weights of seed 0 and version 0 and a context of `tiny.CONFIG`, and a
fixture `answers` (`answers_of(engine)`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_policy as tiny

from trace_jax.errors import UserError
from trace_jax.quantization.plan import QuantPlan
from trace_jax.rollout import Engine, FinishReason, LayerUpdate, Trajectories, UpdateDigest, generate
from trace_jax.rollout.weight_sync import layer_updates


def answers_of(engine: Any) -> Trajectories:
    """Answers of eight plain requests."""
    trajectories = generate(engine, tiny.requests())
    trajectories.validate()
    return trajectories


def answer(trajectories: Trajectories, index: int) -> list[int]:
    """Sampled tokens of a sequence."""
    part = trajectories.sequence(index)
    return part.tokens[part.sampled].tolist()


def collect(engine: Any, count: int) -> Trajectories:
    """Polls until so many sequences have come; in the order of their ids."""
    parts, deadline = [], time.monotonic() + 240
    while sum(part.num_sequences for part in parts) < count:
        assert time.monotonic() < deadline
        parts.append(engine.poll(1.0))
    batch = Trajectories.concat(parts)
    return batch.select(np.argsort(batch.sample_id))


def sync(engine: Any, plan: QuantPlan, seed: int, version: int, compute_dtype: str) -> None:
    """Sends the weights of a seed and compares the acknowledgement."""
    digest = UpdateDigest()
    updates = layer_updates(tiny.policy(compute_dtype), plan, tiny.params(seed), tiny.multipliers(seed))
    assert engine.update_weights(digest.observe(updates), version) == digest.ack(version)


class EngineConformance:
    """Attributes say what the engine computes.

    Attributes:
      plan: formats of the rollout.
      compute_dtype: of the policy.
      tolerance: of log-probabilities when neighbours change.
    """

    plan: QuantPlan
    compute_dtype = "float32"
    tolerance = 0.0

    def test_an_answer_does_not_depend_on_its_neighbours(self, engine, answers):
        """Nor on the sample's id, prompt or group; other batch sizes are other programs and stay within 1e-4."""
        chosen = [6, 3, 1, 7, 0]
        tiny.assert_same_answers(generate(engine, [tiny.requests()[i] for i in chosen]), answers.select(chosen), self.tolerance)
        for index in (0, 5):
            alone = generate(engine, [tiny.requests()[index]])
            tiny.assert_same_answers(alone, answers.select([index]), tolerance=1e-4)
        renamed = [replace(request, sample_id=2**63 + i, group=9, prompt_id=3) for i, request in enumerate(tiny.requests())]
        again = generate(engine, renamed)
        tiny.assert_same_answers(again, answers, self.tolerance)
        assert again.sample_id.tolist() == [2**63 + i for i in range(8)] and set(again.group) == {9} and set(again.prompt_id) == {3}

    def test_the_seed_decides(self, engine, answers):
        other = generate(engine, [replace(request, seed=request.seed + 1) for request in tiny.requests()])
        assert all(answer(other, i) != answer(answers, i) for i in range(8))
        one_seed = generate(engine, [replace(tiny.requests()[0], sample_id=i, seed=i // 4) for i in range(8)])
        assert answer(one_seed, 0) == answer(one_seed, 3) != answer(one_seed, 4) == answer(one_seed, 7)

    def test_greedy_answers_do_not_depend_on_the_seed(self, engine):
        first, second = (generate(engine, [replace(r, temperature=0.0, seed=r.seed + s) for r in tiny.requests()]) for s in (0, 1))
        tiny.assert_same_answers(first, second, self.tolerance)

    def test_a_stop_token_ends_the_answer_and_belongs_to_it(self, engine, answers):
        stops = [answer(answers, i)[5] for i in range(8)]
        stopped = generate(engine, [replace(request, stop_token_ids=(stops[i],)) for i, request in enumerate(tiny.requests())])
        for i in range(8):
            whole = answer(answers, i)
            assert answer(stopped, i) == whole[: whole.index(stops[i]) + 1]
        assert set(stopped.finish_reason) == {FinishReason.STOP}
        stopped.validate()

    def test_an_empty_answer_is_its_stop_token(self, engine, answers):
        firsts = tuple({answer(answers, i)[0] for i in range(8)})
        empty = generate(engine, [replace(request, stop_token_ids=firsts) for request in tiny.requests()])
        empty.validate()
        np.testing.assert_array_equal(empty.sampled_lengths(), 1)
        assert set(empty.finish_reason) == {FinishReason.STOP}

    def test_answers_are_cut_at_their_own_limit(self, engine, answers):
        limits = [1, 2, 5, 13, 14, 14, 3, 1]
        cut = generate(engine, [replace(request, max_new_tokens=n) for request, n in zip(tiny.requests(), limits, strict=True)])
        np.testing.assert_array_equal(cut.sampled_lengths(), limits)
        assert set(cut.finish_reason) == {FinishReason.LENGTH}
        assert all(answer(cut, i) == answer(answers, i)[:n] for i, n in enumerate(limits))

    def test_log_probabilities_are_those_of_the_trainer(self, engine, answers):
        """Prompts of 3 to 64 tokens with answers of 40, and the plain ones; a trainer without the rollout's rounding is far off."""
        rng = np.random.default_rng(2)
        prompts = [rng.integers(0, tiny.CONFIG.vocab_size, size).astype(np.int32) for size in (60, 17, 33, 48, 16, 3, 64)]
        long = [replace(request, tokens=tokens, max_new_tokens=40) for request, tokens in zip(tiny.requests()[1:], prompts, strict=True)]
        mixed = generate(engine, [tiny.requests()[0], *long])
        mixed.validate()
        np.testing.assert_array_equal(mixed.sampled_lengths(), [14] + [40] * 7)
        tiny.assert_same_answers(mixed.select([0]), answers.select([0]), tolerance=1e-4)
        batch = tiny.batch_of(mixed, length=112)
        gap = tiny.gap(batch, tiny.score(batch, self.trainer_plan(), self.compute_dtype)[0])
        control = tiny.gap(batch, tiny.score(batch, tiny.PLANS["bf16"], self.compute_dtype)[0])
        assert gap.max() <= 1e-4 and control.mean() > 100 * gap.mean()

    def trainer_plan(self) -> QuantPlan:
        """The trainer's forward that must agree with the rollout."""
        return tiny.guided(self.plan)

    def test_log_probabilities_are_those_of_the_truncated_distribution(self, engine, answers):
        settings = [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.6}, {"top_p": 0.9, "top_k": 5}] + [{}] * 4
        result = generate(engine, [replace(request, **how) for request, how in zip(tiny.requests(), settings, strict=True)])
        tiny.assert_same_answers(result.select(range(4, 8)), answers.select(range(4, 8)), tolerance=1e-5)
        assert np.max(np.abs(result.select([0]).logprobs)) < 1e-6  # one survivor has probability one
        batch = tiny.batch_of(result)
        logp, _ = tiny.score(batch, self.trainer_plan(), self.compute_dtype)
        ratio = (np.asarray(batch.logp_rollout) - logp)[:4][np.asarray(batch.sampled)[:4]]
        assert ratio.min() > -1e-4 and ratio.mean() > 0.2  # log S of the trainer's full distribution: why training refuses it

    def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_queued(self, engine):
        good = tiny.requests()[0]
        for size, new, match in [(128, 1, "context of 128"), (115, 14, "context of 128")]:
            with pytest.raises(UserError, match=match):
                engine.submit([good, replace(good, tokens=np.zeros(size, np.int32), max_new_tokens=new)])
        for token in (-1, tiny.CONFIG.vocab_size):
            with pytest.raises(UserError, match="token ids outside 0..96"):
                engine.submit([good, replace(good, tokens=np.asarray([1, token], np.int32))])
        assert engine.health().pending == 0
        engine.submit([replace(good, tokens=np.zeros(114, np.int32), max_new_tokens=14)])
        engine.abort([good.sample_id])
        assert collect(engine, 1).finish_reason.tolist() == [FinishReason.ABORTED]

    def test_aborted_requests_come_back_without_an_answer(self, engine, answers):
        engine.submit(tiny.requests())
        engine.abort([2, 4, 999])
        result = collect(engine, 8)
        result.validate()
        assert np.flatnonzero(result.finish_reason == FinishReason.ABORTED).tolist() == [2, 4]
        finished = [0, 1, 3, 5, 6, 7]
        tiny.assert_same_answers(result.select(finished), answers.select(finished), self.tolerance)
        assert not result.select([2, 4]).sampled.any() and engine.health().pending == 0

    def test_pause_holds_requests_and_resume_serves_them(self, engine, answers):
        engine.pause()
        engine.submit(tiny.requests())
        assert engine.poll(0.1).num_sequences == 0 and engine.health().paused and engine.health().pending == 8
        with pytest.raises(RuntimeError, match="paused"):
            generate(engine, [replace(tiny.requests()[0], sample_id=77)])
        engine.abort([77])
        assert engine.poll().sample_id.tolist() == [77]
        engine.resume()
        tiny.assert_same_answers(collect(engine, 8), answers, self.tolerance)
        engine.submit(tiny.requests())
        engine.pause("abort")
        assert set(collect(engine, 8).finish_reason) == {FinishReason.ABORTED}
        engine.resume()
        assert engine.health().pending == 0

    def test_other_weights_and_back(self, engine, answers):
        """Every token says which weights drew it; the old weights give the old answers, bit for bit."""
        sync(engine, self.plan, 1, 7, self.compute_dtype)
        other = generate(engine, tiny.requests())
        assert engine.health().version == 7 and set(other.weight_version) == {7} and set(answers.weight_version) == {0}
        assert all(answer(other, i) != answer(answers, i) for i in range(8))
        sync(engine, self.plan, 0, 0, self.compute_dtype)
        tiny.assert_same_answers(generate(engine, tiny.requests()), answers)

    def test_an_update_that_does_not_fit_changes_nothing(self, engine, answers):
        updates = list(layer_updates(tiny.policy(self.compute_dtype), self.plan, tiny.params(1), tiny.multipliers(1)))
        name = next(iter(updates[1].tensors))
        lacking = LayerUpdate(1, {key: tensor for key, tensor in updates[1].tensors.items() if key != name})
        for wrong in (
            [updates[0], lacking, *updates[2:]],
            updates[:-1],
            [*updates, LayerUpdate(None, {"stranger": np.zeros(1, np.float32)})],
        ):
            with pytest.raises(ValueError, match=r"(?s)fit|refused"):
                engine.update_weights(iter(wrong), 9)
            assert engine.health().version == 0
        tiny.assert_same_answers(generate(engine, tiny.requests()), answers)

    def test_the_engine_says_what_it_is(self, engine):
        assert isinstance(engine, Engine)
        told = engine.capabilities()
        executed = {"weights": told.weights, "activations": told.activations, "k": told.k, "v": told.v}
        plan = self.plan
        assert executed == {
            "weights": plan.weights,
            "activations": plan.expert_input.format,
            "k": plan.k.format,
            "v": plan.v.format,
        }
        assert told.backend and engine.health().alive
