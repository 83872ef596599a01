"""Combinations that cannot work, and settings of the design that this version does not implement.

Everything here is refused by one line that names the key and what to write instead, so that no setting is ever
silently ignored.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from trace_jax.config.schema import Config
from trace_jax.errors import UserError
from trace_jax.quantization.plan import BLOCK_FORMATS

ENGINE_GROUP = "trace_jax.engines"
"""Entry-point group in which installed packages offer rollout engines.

`NAME = "module:factory"` is what `rollout.engine: NAME` takes. The factory is called with one argument, a
`trace_jax.rollout.engine_setup.EngineSetup`, and returns a `trace_jax.rollout.Engine` without weights; they follow by `update_weights`.
"""


def check(config: Config) -> None:
    """Refuses what cannot work in any command.

    Raises:
      UserError: the first problem found.
    """
    _check_model(config)
    _check_not_implemented(config)
    _check_sampling(config)
    _check_guidance(config)
    _check_algorithm(config)
    _check_training_keys(config)


def check_for_training(config: Config) -> None:
    """Refuses sampling settings that bias the policy ratio; `eval` and `rollout` may use them.

    The engine's log-probs are those of the truncated, renormalised distribution and the trainer's those of the full
    one, so every ratio would be off by the mass that truncation removed.

    Raises:
      UserError: the first problem found.
    """
    rollout = config.rollout
    if rollout.temperature == 0:
        raise UserError("rollout.temperature is 0: greedy answers of a group are all alike and have no ratio; write 1.0 to train")
    if rollout.top_p < 1:
        raise UserError(f"rollout.top_p is {rollout.top_p}: a truncated distribution biases the policy ratio; write 1.0 to train")
    if rollout.top_k > 0:
        raise UserError(f"rollout.top_k is {rollout.top_k}: a truncated distribution biases the policy ratio; write -1 to train")
    if rollout.group_size < 2:
        raise UserError("rollout.group_size is 1: an advantage compares answers of one group; write 2 or more to train")


def _check_model(config: Config) -> None:
    model = config.model
    if model.source is None and not model.config:
        raise UserError(
            "model.source and model.config are both empty; set model.source to a checkpoint, or model.config to build a random model"
        )


def _check_not_implemented(config: Config) -> None:
    engine = config.rollout.engine
    if engine != "jax":
        installed = sorted({point.name for point in entry_points(group=ENGINE_GROUP)})
        if engine not in installed:
            raise UserError(
                f"rollout.engine is {engine!r}, which no installed package provides; write one of: {', '.join(['jax', *installed])}"
            )
        if config.rollout.partial_sums != 1:
            raise UserError(f"rollout.partial_sums is {config.rollout.partial_sums}, which only rollout.engine: jax imitates; write 1")
    if config.rollout.launcher == "process" and config.rollout.engines > 1:
        raise UserError(
            f"rollout.engines is {config.rollout.engines}, but rollout.launcher process runs one engine; write launcher: ray, or engines: 1"
        )
    if config.rollout.residual_compensation.fraction > 0:
        _check_compensation(config)
    for axis, size in config.mesh:
        if size < 1 and size != -1:
            raise UserError(f"mesh.{axis} is {size}; write the number of devices along the axis, or -1 for what the others leave")
    left = [axis for axis, size in config.mesh if size == -1]
    if len(left) > 1:
        raise UserError(f"mesh.{left[0]} and mesh.{left[1]} are both -1, and only one axis can take what is left; write a size for one")


def _check_compensation(config: Config) -> None:
    key = "rollout.residual_compensation.fraction is above 0"
    if config.rollout.activations not in BLOCK_FORMATS:
        raise UserError(
            f"{key}, but rollout.activations is {config.rollout.activations} and only {' and '.join(BLOCK_FORMATS)} are "
            "compensated; write 0.0, or one of these"
        )
    if config.train_quant.activations == "guided":
        raise UserError(f"{key}, but train_quant.activations is guided, and a record has no residual; write activations: rtn, or none")


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.top_k != -1 and rollout.top_k < 1:
        raise UserError(f"rollout.top_k is {rollout.top_k}; write -1 to switch it off, or 1 or more")
    if config.eval.greedy and config.eval.samples > 1:
        raise UserError(
            f"eval.samples is {config.eval.samples} with eval.greedy, which gives the same answer each time; write 1, or eval.greedy: false"
        )
    if rollout.max_prompt_tokens is not None:
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        if config.train.micro_batch_tokens < longest:
            raise UserError(
                f"train.micro_batch_tokens is {config.train.micro_batch_tokens}, but one sequence can have {longest} tokens "
                f"(rollout.max_prompt_tokens + rollout.max_new_tokens); write {longest} or more"
            )


def _check_guidance(config: Config) -> None:
    rollout, quant, guidance = config.rollout, config.train_quant, config.guidance
    sites_of = {"activations": ("expert_input",), "kv_cache": ("k", "v")}
    for key, sites in sites_of.items():
        if getattr(quant, key) != "guided":
            continue
        if guidance.record == "none":
            raise UserError(f"train_quant.{key} is guided, but guidance.record is none; write {key}: rtn, or record: mantissa")
        formats = [rollout.format_of(site) for site in sites]
        if not any(name in BLOCK_FORMATS for name in formats) or "fp8" in formats:
            source = "rollout.activations" if key == "activations" else "rollout.kv_cache"
            raise UserError(
                f"train_quant.{key} is guided, but {source} is {', '.join(formats)} and only {' and '.join(BLOCK_FORMATS)} can be "
                f"recorded; write {key}: {'rtn' if 'fp8' in formats else 'none'}, or an FP4 format in the rollout"
            )
        if not set(sites) & set(config.recorded_sites):
            raise UserError(f"train_quant.{key} is guided, but guidance.sites has no {' or '.join(sites)}; add it, or write {key}: rtn")
    if guidance.record != "none" and not config.recorded_sites:
        raise UserError(f"guidance.record is {guidance.record}, but no site of guidance.sites is FP4 in the rollout; write record: none")
    if guidance.record != "none" and "guided" not in (quant.activations, quant.kv_cache):
        raise UserError(
            f"guidance.record is {guidance.record}, but nothing follows the record: train_quant.activations is {quant.activations} and "
            f"train_quant.kv_cache is {quant.kv_cache}; write record: none, or guided"
        )


def _check_algorithm(config: Config) -> None:
    algorithm, correction = config.algorithm, config.algorithm.correction
    if algorithm.clip_c is not None and algorithm.loss != "ppo_clip":
        raise UserError(f"algorithm.clip_c is {algorithm.clip_c}, which only algorithm.loss: ppo_clip has; write clip_c: null")
    if algorithm.loss_scale_factor is not None and algorithm.aggregation != "seq_mean_token_sum_norm":
        raise UserError(
            f"algorithm.loss_scale_factor is {algorithm.loss_scale_factor}, but algorithm.aggregation {algorithm.aggregation} has no "
            "constant; write loss_scale_factor: null, or aggregation: seq_mean_token_sum_norm"
        )
    if correction.low is not None and correction.kind != "icepop":
        raise UserError(
            f"algorithm.correction.low is {correction.low}, but kind {correction.kind} has no lower bound; write low: null, or kind: icepop"
        )
    if correction.kind == "icepop" and correction.lower_bound >= correction.cap:
        raise UserError(
            f"algorithm.correction keeps no token: its low is {correction.lower_bound} and its cap {correction.cap}; write a cap above it"
        )
    if correction.kind == "none" and correction.level != "token":
        raise UserError(f"algorithm.correction.level is {correction.level}, but kind none has no weight; write level: token, or kind: tis")
    overlong, longest = algorithm.overlong_buffer, config.rollout.max_new_tokens
    if overlong.len is not None and not overlong.enable:
        raise UserError(f"algorithm.overlong_buffer.len is {overlong.len}, but enable is false; write enable: true, or len: null")
    if overlong.len is not None and overlong.len > longest:
        raise UserError(
            f"algorithm.overlong_buffer.len is {overlong.len}, more than rollout.max_new_tokens={longest}: every answer would be too long; "
            f"write {longest} or less"
        )


def _check_training_keys(config: Config) -> None:
    needed = config.least_staleness
    if config.asynchronous and config.algorithm.correction.kind == "none":
        raise UserError(
            f"sync.max_staleness is {config.sync.max_staleness}, so training is asynchronous, but algorithm.correction.kind is none and "
            f"nothing weights answers of older policies; write kind: tis, or max_staleness: {needed}"
        )
    if config.sync.max_staleness < needed:
        raise UserError(
            f"sync.max_staleness is {config.sync.max_staleness}, but with sync.every={config.sync.every} and train.updates_per_batch="
            f"{config.train.updates_per_batch} a token is up to {needed} updates old when used; write {needed} or more"
        )
    if config.sft.stop_pass_rate is not None and config.sft.eval_every == 0:
        raise UserError("sft.stop_pass_rate is set, but sft.eval_every is 0, so it is never looked at; write sft.eval_every: 10")
    optimizer = config.optimizer
    if optimizer.name == "adam" and optimizer.weight_decay > 0:
        raise UserError("optimizer.weight_decay is set, but adam has none; write name: adamw, or weight_decay: 0.0")
    updates = config.steps * config.train.updates_per_batch
    if optimizer.decay_steps is not None and optimizer.decay_steps < updates:
        raise UserError(
            f"optimizer.decay_steps is {optimizer.decay_steps}, but the run makes {updates} updates, the last of them with a learning rate "
            f"of zero; write optimizer.decay_steps: {updates} or more, or null for a constant rate"
        )
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        raise UserError(
            f"optimizer.decay_steps is {optimizer.decay_steps} and optimizer.warmup_steps {optimizer.warmup_steps}, so nothing is left for "
            f"the way down; write optimizer.decay_steps: {optimizer.warmup_steps + 1} or more, or a shorter warm-up"
        )
    if config.train.updates_per_batch > config.rollout.prompts_per_step:
        raise UserError(
            f"train.updates_per_batch is {config.train.updates_per_batch}, but a batch has only {config.rollout.prompts_per_step} prompts "
            "to split; write fewer updates or more rollout.prompts_per_step"
        )
