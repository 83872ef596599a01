"""The supervised cold start: worked answers until the pass rate or the step limit is reached."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from trace_jax.config import Config, dump
from trace_jax.evaluation.pass_rate import measure_pass_rate
from trace_jax.files import write_atomic
from trace_jax.metrics.writers import open_writers
from trace_jax.models.registry import Params
from trace_jax.quantization.plan import UNQUANTIZED
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.train.checkpoint import Checkpoints, Progress
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.run import Report, StopRequest, say, stop_on_signal
from trace_jax.train.run_folder import claimed
from trace_jax.train.setup import Setup, calibrated, initial_policy, sync_weights
from trace_jax.train.sft import batch_width, sft_batch, sft_gradient
from trace_jax.train.state import TrainState, apply_gradients


def run_sft(config: Config, directory: Path, report: Report | None = None) -> dict[str, Any]:
    """Trains on worked answers and writes a checkpoint that `train` starts from.

    Stops when the pass rate on `sft.split_for_stop` reaches `sft.stop_pass_rate` (BF16, at the rollout's temperature), after
    `sft.steps`, or after the step in progress when a signal asks to. The static multipliers are calibrated at the end and
    stored with the weights.

    Args:
      config: checked.
      directory: a new or empty directory; nothing is written before everything is checked.
      report: called after every step.

    Returns:
      The last metrics; none if a signal came before the first step.
    """
    with stop_on_signal() as stop:
        with claimed(directory, resume=None):
            setup, params, _ = initial_policy(config)
            with closing(setup.task):
                width = _checked_width(setup)
                if not stop.asked:
                    return _run(setup, params, width, directory, stop, report or (lambda step, metrics: None))
        say("stopped before anything was written")
        return {}


def _checked_width(setup: Setup) -> int:
    """Width of a batch; refuses what would fail later: an empty split, a prompt or an example beyond the context."""
    if setup.config.sft.eval_every:
        setup.task.rows(setup.config.sft.split_for_stop)
        setup.max_sequence_tokens()
    return batch_width(setup.task.rows("train"), setup.tokenizer, setup.policy.config.max_position)


def _run(setup: Setup, params: Params, width: int, directory: Path, stop: StopRequest, report: Report) -> dict[str, Any]:
    config, sft = setup.config, setup.config.sft
    optimizer = make_optimizer(config.optimizer.model_copy(update={"learning_rate": sft.learning_rate, "warmup_steps": sft.warmup_steps}))
    opt_state = jax.jit(optimizer.init)(params)
    probe = replace(setup, rollout_plan=UNQUANTIZED)
    engine = EmbeddedEngine(setup.policy, UNQUANTIZED, CaptureSpec(), config.rollout.max_batch)
    write_atomic(directory / "config.yaml", [dump(config).encode()])
    metrics: dict[str, Any] = {}
    with closing(open_writers(directory, list(config.loggers))) as log:
        for step in range(1, sft.steps + 1):
            rows = setup.task.prompts("train", (step - 1) * sft.batch_size, sft.batch_size)
            gradient, loss, _ = sft_gradient(params, sft_batch(rows, setup.tokenizer, width), policy=setup.policy)
            params, opt_state, norm = apply_gradients(params, opt_state, gradient, optimizer=optimizer)
            metrics = {"sft/loss": float(loss), "grad_norm": float(norm)}
            due = sft.eval_every and step % sft.eval_every == 0
            if due:
                metrics |= _probe(probe, engine, params, step)
            log.write(step, metrics)
            report(step, metrics)
            if stop.asked or (due and sft.stop_pass_rate is not None and metrics["sft/pass_at_1"] >= sft.stop_pass_rate):
                break
    state = TrainState(params, opt_state, calibrated(setup, params))
    with closing(Checkpoints(directory / "checkpoints", config.checkpoint.keep)) as checkpoints:
        checkpoints.save(state, Progress(step=step, seed=config.seed), setup.policy, config.tokenizer, config.model_dump(mode="json"))
    if stop.asked:
        say(f"stopped; step {step} is saved")
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
