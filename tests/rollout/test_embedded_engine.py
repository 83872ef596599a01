"""Behaviour of the embedded engine: what an answer depends on, where it ends, and what is recorded."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_policy as tiny

from trace_jax.errors import UserError
from trace_jax.rollout import Engine, FinishReason, Trajectories, generate
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine

PLAN = tiny.PLANS["nvfp4"]


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(PLAN, "float32", kind="codes")


@pytest.fixture(scope="module")
def answers(engine) -> Trajectories:
    """Answers of eight plain requests."""
    trajectories = generate(engine, tiny.requests())
    trajectories.validate()
    return trajectories


def answer(trajectories, index):
    part = trajectories.sequence(index)
    return part.tokens[part.sampled].tolist()


def test_an_answer_does_not_depend_on_its_neighbours(engine, answers):
    """Other neighbours and another row leave every bit; a wave of one is another program and stays within 1e-4."""
    chosen = [6, 3, 1, 7, 0]
    wave = [tiny.requests()[i] for i in chosen]
    tiny.assert_same_answers(generate(engine, wave), answers.select(chosen))
    for index in (0, 5):
        tiny.assert_same_answers(generate(engine, [tiny.requests()[index]]), answers.select([index]), tolerance=1e-4)


def test_more_requests_than_a_wave_holds(engine, answers):
    requests = [replace(request, sample_id=i) for i, request in enumerate(tiny.requests() * 2 + tiny.requests()[:5])]
    engine.submit(requests)
    sizes = []
    while engine.health().pending:
        sizes.append(engine.poll().num_sequences)
    assert sizes == [8, 8, 5] and engine.poll().num_sequences == 0
    tiny.assert_same_answers(generate(engine, requests), Trajectories.concat([answers, answers, answers.select(range(5))]))


def test_the_seed_decides_and_nothing_else(engine, answers):
    renamed = [replace(request, sample_id=50 + i, group=9, prompt_id=3) for i, request in enumerate(tiny.requests())]
    tiny.assert_same_answers(generate(engine, renamed), answers)
    other = generate(engine, [replace(request, seed=request.seed + 1) for request in tiny.requests()])
    assert all(answer(other, i) != answer(answers, i) for i in range(8))
    one_seed = generate(engine, [replace(tiny.requests()[0], sample_id=i, seed=i // 4) for i in range(8)])
    assert answer(one_seed, 0) == answer(one_seed, 3) != answer(one_seed, 4) == answer(one_seed, 7)


def test_greedy_answers_do_not_depend_on_the_seed(engine):
    first, second = (generate(engine, [replace(r, temperature=0.0, seed=r.seed + s) for r in tiny.requests()]) for s in (0, 1))
    tiny.assert_same_answers(first, second)


def test_a_stop_token_ends_the_answer_and_belongs_to_it(engine, answers):
    stops = [answer(answers, i)[5] for i in range(8)]
    stopped = generate(engine, [replace(request, stop_token_ids=(stops[i],)) for i, request in enumerate(tiny.requests())])
    for i in range(8):
        whole = answer(answers, i)
        assert answer(stopped, i) == whole[: whole.index(stops[i]) + 1]
    assert set(stopped.finish_reason) == {FinishReason.STOP}
    stopped.validate()


def test_an_empty_answer_is_its_stop_token(engine, answers):
    firsts = tuple({answer(answers, i)[0] for i in range(8)})
    empty = generate(engine, [replace(request, stop_token_ids=firsts) for request in tiny.requests()])
    np.testing.assert_array_equal(empty.sampled_lengths(), 1)
    assert set(empty.finish_reason) == {FinishReason.STOP}
    assert empty.routes is not None and empty.guidance is not None
    np.testing.assert_array_equal(np.flatnonzero(~empty.guidance.valid), empty.offsets[1:] - 1)
    batch = tiny.batch_of(empty)
    assert tiny.gap(batch, tiny.score(batch, tiny.guided(PLAN), "float32")[0]).max() <= 1e-4


def test_answers_are_cut_at_their_own_limit(engine, answers):
    limits = [1, 2, 5, 13, 14, 14, 3, 1]
    cut = generate(engine, [replace(request, max_new_tokens=n) for request, n in zip(tiny.requests(), limits, strict=True)])
    np.testing.assert_array_equal(cut.sampled_lengths(), limits)
    assert set(cut.finish_reason) == {FinishReason.LENGTH}
    assert all(answer(cut, i) == answer(answers, i)[:n] for i, n in enumerate(limits))


def test_long_prompts_and_answers_over_several_chunks(engine, answers):
    """Prompts of 3 to 60 tokens share a wave; the short one is answered as in a narrow wave."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, tiny.CONFIG.vocab_size, size).astype(np.int32) for size in (60, 17, 33, 48, 16, 3, 64)]
    long = [replace(request, tokens=tokens, max_new_tokens=40) for request, tokens in zip(tiny.requests()[1:], prompts, strict=True)]
    mixed = generate(engine, [tiny.requests()[0], *long])
    mixed.validate()
    np.testing.assert_array_equal(mixed.sampled_lengths(), [14] + [40] * 7)
    tiny.assert_same_answers(mixed.select([0]), answers.select([0]), tolerance=1e-4)
    batch = tiny.batch_of(mixed, length=112)
    assert tiny.gap(batch, tiny.score(batch, tiny.guided(PLAN), "float32")[0]).max() <= 1e-4


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_queued(engine):
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
    assert engine.poll().finish_reason.tolist() == [FinishReason.ABORTED]


def test_aborted_requests_come_back_without_an_answer(engine, answers):
    engine.submit(tiny.requests())
    engine.abort([2, 4, 999])
    result = engine.poll()
    result.validate()
    reason = dict(zip(result.sample_id.tolist(), result.finish_reason.tolist(), strict=True))
    assert {sample for sample, why in reason.items() if why == FinishReason.ABORTED} == {2, 4} and len(reason) == 8
    finished = [0, 1, 3, 5, 6, 7]
    place = {sample: index for index, sample in enumerate(result.sample_id.tolist())}
    tiny.assert_same_answers(result.select([place[s] for s in finished]), answers.select(finished))
    assert not result.select([place[2]]).sampled.any()


def test_pause_holds_requests_and_resume_serves_them(engine, answers):
    engine.pause()
    engine.submit(tiny.requests())
    assert engine.poll().num_sequences == 0 and engine.health().paused and engine.health().pending == 8
    with pytest.raises(RuntimeError, match="paused"):
        generate(engine, [replace(tiny.requests()[0], sample_id=77)])
    engine.abort([77])
    assert engine.poll().sample_id.tolist() == [77]
    engine.resume()
    tiny.assert_same_answers(engine.poll(), answers)
    engine.submit(tiny.requests())
    engine.pause("abort")
    assert set(engine.poll().finish_reason) == {FinishReason.ABORTED}
    engine.resume()
    assert engine.health().pending == 0


def test_logp_05_truncated_sampling_reports_the_renormalised_distribution(engine, answers):
    settings = [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.6}, {"top_p": 0.9, "top_k": 5}] + [{}] * 4
    result = generate(engine, [replace(request, **how) for request, how in zip(tiny.requests(), settings, strict=True)])
    tiny.assert_same_answers(result.select(range(4, 8)), answers.select(range(4, 8)), tolerance=1e-5)
    assert np.max(np.abs(result.select([0]).logprobs)) < 1e-6  # one survivor has probability one
    batch = tiny.batch_of(result)
    logp, _ = tiny.score(batch, tiny.guided(PLAN), "float32")
    ratio = (np.asarray(batch.logp_rollout) - logp)[:4][np.asarray(batch.sampled)[:4]]
    assert ratio.min() > -1e-4 and ratio.mean() > 0.2  # log S of the trainer's full distribution: why training refuses it


def test_an_audited_wave_gives_the_same_compact_record():
    layers = (1, 2)
    engine = EmbeddedEngine(tiny.policy("float32"), PLAN, CaptureSpec("mantissa", ("expert_input", "v"), layers), 8)
    tiny.sync(engine, 0)
    plain = generate(engine, tiny.requests())
    audited = generate(engine, [replace(request, audit=i in (1, 6)) for i, request in enumerate(tiny.requests())])
    audited.validate()
    tiny.assert_same_answers(plain, audited)
    assert plain.audit is None and audited.audit is not None and plain.guidance is not None and audited.guidance is not None
    compact, wanted = audited.guidance.arrays(), plain.guidance.arrays()
    assert compact.keys() == wanted.keys() and set(plain.guidance.sites) == {"expert_input", "v"}
    for name, array in wanted.items():
        np.testing.assert_array_equal(compact[name], array, err_msg=name)
    assert audited.audit.sequences.tolist() == [1, 6] and set(audited.audit.record.sites) == {"expert_input", "k", "v"}
    from_audit, own = audited.audit.record.to_compact("mantissa", layers), plain.select([1, 6]).guidance
    assert own is not None
    for name in own.sites:
        np.testing.assert_array_equal(from_audit.sites[name].data, own.sites[name].data)
        np.testing.assert_array_equal(from_audit.sites[name].scales, own.sites[name].scales)


def test_the_engine_says_what_it_is(engine):
    assert isinstance(engine, Engine)
    told = engine.capabilities()
    assert (told.weights, told.activations, told.k, told.v, told.query) == ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "float32")
    assert told.routes and "codes" in told.record_kinds
    assert tiny.engine(tiny.PLANS["bf16"], seed=None).capabilities().record_kinds == ()


def test_an_engine_without_weights_and_a_closed_one():
    engine = tiny.engine(PLAN, seed=None)
    engine.submit(tiny.requests())
    with pytest.raises(RuntimeError, match="call update_weights first"):
        engine.poll()
    engine.abort([0])
    engine.close()
    engine.close()
    assert not engine.health().alive and engine.health().pending == 0
