"""The supervised cold start: worked answers until the pass rate or the step limit is reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from trace_jax.config import Config, dump
from trace_jax.evaluation.pass_rate import measure_pass_rate
from trace_jax.files import write_atomic
from trace_jax.metrics.writers import open_writers
from trace_jax.quantization.plan import UNQUANTIZED
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.run import stop_on_signal
from trace_jax.train.setup import Setup, calibrated, initial_policy, sync_weights
from trace_jax.train.sft import padded_length, sft_batch, sft_gradient, worked_example
from trace_jax.train.state import TrainState, apply_gradients


def run_sft(config: Config, directory: Path, report: Callable[[int, dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Trains on worked answers and writes a checkpoint that `train` starts from.

    Stops when the pass rate on `sft.split_for_stop` reaches `sft.stop_pass_rate` (BF16, at the rollout's temperature), or
    after `sft.steps`. The static multipliers are calibrated at the end and stored with the weights.

    Returns:
      The last metrics.
    """
    setup, params, _ = initial_policy(config)
    sft = config.sft
    optimizer = make_optimizer(config.optimizer.model_copy(update={"learning_rate": sft.learning_rate, "warmup_steps": sft.warmup_steps}))
    opt_state = jax.jit(optimizer.init)(params)
    probe = replace(setup, rollout_plan=UNQUANTIZED)
    engine = EmbeddedEngine(setup.policy, UNQUANTIZED, CaptureSpec(), config.rollout.max_batch)
    width = padded_length(max(len(worked_example(row, setup.tokenizer)[0]) for row in setup.task.rows("train")))
    write_atomic(directory / "config.yaml", [dump(config).encode()])
    log = open_writers(directory, list(config.loggers))
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
    metrics: dict[str, Any] = {}
    step = 0
    try:
        with stop_on_signal() as stop:
            while step < sft.steps and not stop.asked:
                rows = setup.task.prompts("train", step * sft.batch_size, sft.batch_size)
                gradient, loss, _ = sft_gradient(params, sft_batch(rows, setup.tokenizer, width), policy=setup.policy)
                params, opt_state, norm = apply_gradients(params, opt_state, gradient, optimizer=optimizer)
                step += 1
                metrics = {"sft/loss": float(loss), "grad_norm": float(norm)}
                due = sft.eval_every and step % sft.eval_every == 0
                if due:
                    metrics |= _probe(probe, engine, params, step)
                log.write(step, metrics)
                if report is not None:
                    report(step, metrics)
                if due and sft.stop_pass_rate is not None and metrics["sft/pass_at_1"] >= sft.stop_pass_rate:
                    break
        state = TrainState(params, opt_state, calibrated(setup, params))
        checkpoints.save(state, Progress(step=step, seed=config.seed), setup.policy, config.tokenizer, config.model_dump(mode="json"))
    finally:
        log.close()
        checkpoints.wait()
        checkpoints.close()
        setup.task.close()
    return metrics


def _probe(setup: Setup, engine: EmbeddedEngine, params: dict, step: int) -> dict[str, float]:
    sync_weights(engine, setup, params, {}, step)
    sft = setup.config.sft
    result = measure_pass_rate(
        engine,
        setup.task,
        setup.tokenizer,
        setup.sampling,
        split=sft.split_for_stop,
        samples=1,
        max_prompts=sft.max_prompts,
        seed=setup.config.seed,
    )
    return {"sft/pass_at_1": result.pass_at_1, "sft/reward_mean": result.reward_mean}
