"""Runs in the interpreter that has vLLM, with the packages of the tests' environment behind its own: vLLM in the trainer's process.

python in_process.py FOLDER PATH...      the paths of the tests' interpreter
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += sys.argv[2:]

import tiny_policy as tiny  # noqa: E402

from rollout_bridge.engine.factory import make  # noqa: E402
from tests.rollout.engine_conformance import sync  # noqa: E402
from tests.rollout_bridge.engine.tiny_setup import W4A4KV4, tiny_setup  # noqa: E402
from trace_jax.quantization.plan import trainer_plan  # noqa: E402
from trace_jax.rollout import FinishReason, generate  # noqa: E402


def main(folder: Path) -> None:
    """Updates, answers with routes, an aborted and resubmitted request."""
    engine = make(tiny_setup("rollout.vllm.mode=in_process", directory=folder))
    for seed, version in ((1, 0), (0, 1)):
        sync(engine, W4A4KV4, seed, version, "float32")
    answers = generate(engine, tiny.requests())
    answers.validate()
    assert answers.routes is not None and answers.routes.routes_valid.sum() == answers.num_tokens - 8 and set(answers.weight_version) == {1}
    batch = tiny.batch_of(answers)
    gap = tiny.gap(batch, tiny.score(batch, trainer_plan(W4A4KV4, "rtn", "rtn", "rtn", "rtn"), "float32")[0])
    assert gap.max() <= 1e-4, gap.max()
    engine.submit(tiny.requests())
    assert engine.poll(0.0).num_sequences == 0
    engine.abort([3])
    ended = engine.poll(0.0)
    assert ended.sample_id.tolist() == [3] and ended.finish_reason.tolist() == [FinishReason.ABORTED]
    engine.submit([tiny.requests()[3]])
    engine.pause()
    again = engine.poll(0.0)
    tiny.assert_same_answers(again.select(again.sample_id.argsort().tolist()), answers, tolerance=1e-4)
    print(f"{gap.size} tokens, log-prob gap max {gap.max():.1e}; {engine.capabilities()}")
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
