"""The supervised cold start: worked answers until the pass rate or the step limit is reached."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from trace_jax.config import Config
from trace_jax.evaluation.pass_rate import measure_pass_rate
from trace_jax.models.registry import Params
from trace_jax.quantization.plan import UNQUANTIZED
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.sharding.mesh import mesh_of, on_mesh_of
from trace_jax.train.checkpoint import Progress
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.run_folder import Ended, OpenRun, Report, open_run
from trace_jax.train.setup import Setup, calibrated, initial_policy, sync_weights
from trace_jax.train.sft import batch_width, sft_batch, sft_gradient
from trace_jax.train.skipped import count_skipped
from trace_jax.train.state import TrainState, apply_gradients, initial_state


def run_sft(config: Config, directory: Path, report: Report | None = None) -> Ended:
    """Trains on worked answers and writes a checkpoint that `train` starts from.

    Stops when the pass rate on `sft.split_for_stop` reaches `sft.stop_pass_rate` (BF16, at the rollout's temperature), after
    `sft.steps`, or after the step in progress when a signal asks to. The static multipliers are calibrated at the end and
    stored with the weights.

    Args:
      config: checked.
      directory: a new or empty directory; nothing is written before everything is checked.
      report: called after every step.

    Returns:
      The last metrics (none if a signal came before the first step), and whether a signal stopped the run.
    """
    metrics: dict[str, Any] = {}
    with open_run(config, directory, resume=None, report=report) as run:
        setup, params, _ = initial_policy(config)
        with closing(setup.task):
            width = _checked_width(setup)
            if not run.stopping():
                run.begin()
                metrics = _loop(setup, params, width, run)
    return Ended(metrics, run.stop.asked)


def _checked_width(setup: Setup) -> int:
    """Width of a batch; refuses what would fail later: an empty split, a prompt or an example beyond the context."""
    if setup.config.sft.eval_every:
        setup.task.rows(setup.config.sft.split_for_stop)
        setup.max_sequence_tokens()
    return batch_width(setup.task.rows("train"), setup.tokenizer, setup.policy.config.max_position)


def _loop(setup: Setup, params: Params, width: int, run: OpenRun) -> dict[str, Any]:
    config, sft = setup.config, setup.config.sft
    own = {"learning_rate": sft.learning_rate, "warmup_steps": sft.warmup_steps, "decay_steps": None}
    optimizer = make_optimizer(config.optimizer.model_copy(update=own))
    state = initial_state(params, optimizer, {})
    probe = replace(setup, rollout_plan=UNQUANTIZED)
    engine = EmbeddedEngine(setup.policy, UNQUANTIZED, CaptureSpec(), config.rollout.max_batch)
    metrics: dict[str, Any] = {}
    progress, mesh = Progress(seed=config.seed), mesh_of(params)
    for step in range(1, sft.steps + 1):
        rows = setup.task.prompts("train", (step - 1) * sft.batch_size, sft.batch_size)
        gradient, loss, _ = sft_gradient(state.params, sft_batch(rows, setup.tokenizer, width, mesh), policy=setup.policy)
        with on_mesh_of(state.params):
            params, opt_state, norm = apply_gradients(state.params, state.opt_state, gradient, optimizer=optimizer)
        state = TrainState(params, opt_state, {})
        skipped = count_skipped(progress.skipped_in_a_row, float(norm), step, "lower sft.learning_rate")
        progress = replace(progress, step=step, skipped_in_a_row=skipped)
        metrics = {"sft/loss": float(loss), "grad_norm": float(norm), "train/skipped_updates": float(skipped > 0)}
        due = sft.eval_every and step % sft.eval_every == 0
        if due:
            metrics |= _probe(probe, engine, state.params, step)
        run.record(step, metrics)
        if run.stopping() or (due and sft.stop_pass_rate is not None and metrics["sft/pass_at_1"] >= sft.stop_pass_rate):
            break
    state = replace(state, multipliers=calibrated(setup, state.params))
    run.checkpoints.save(state, progress, setup.policy, config.tokenizer, config.model_dump(mode="json"))
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
