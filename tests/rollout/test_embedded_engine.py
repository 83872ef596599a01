"""The embedded engine: the conformance tests, and what is its own: waves, records and audits."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_policy as tiny

from tests.rollout.engine_conformance import EngineConformance, answer, answers_of
from trace_jax.rollout import Trajectories, generate
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine

PLAN = tiny.PLANS["nvfp4"]


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(PLAN, "float32", kind="codes")


@pytest.fixture(scope="module")
def answers(engine) -> Trajectories:
    return answers_of(engine)


class TestEmbeddedEngine(EngineConformance):
    plan = PLAN


def test_more_requests_than_a_wave_holds(engine, answers):
    requests = [replace(request, sample_id=i) for i, request in enumerate(tiny.requests() * 2 + tiny.requests()[:5])]
    engine.submit(requests)
    sizes = []
    while engine.health().pending:
        sizes.append(engine.poll().num_sequences)
    assert sizes == [8, 8, 5] and engine.poll().num_sequences == 0
    tiny.assert_same_answers(generate(engine, requests), Trajectories.concat([answers, answers, answers.select(range(5))]))


def test_an_empty_answer_has_the_records_of_its_prompt(engine, answers):
    firsts = tuple({answer(answers, i)[0] for i in range(8)})
    empty = generate(engine, [replace(request, stop_token_ids=firsts) for request in tiny.requests()])
    assert empty.routes is not None and empty.guidance is not None
    np.testing.assert_array_equal(np.flatnonzero(~empty.guidance.valid), empty.offsets[1:] - 1)
    batch = tiny.batch_of(empty)
    assert tiny.gap(batch, tiny.score(batch, tiny.guided(PLAN), "float32")[0]).max() <= 1e-4


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


def test_an_engine_without_weights_and_a_closed_one():
    engine = tiny.engine(PLAN, seed=None)
    engine.submit(tiny.requests())
    with pytest.raises(RuntimeError, match="call update_weights first"):
        engine.poll()
    engine.abort([0])
    engine.close()
    engine.close()
    assert not engine.health().alive and engine.health().pending == 0


def test_it_says_what_it_records(engine):
    told = engine.capabilities()
    assert told.query == "float32" and told.routes and "codes" in told.record_kinds
    assert tiny.engine(tiny.PLANS["bf16"], seed=None).capabilities().record_kinds == ()
