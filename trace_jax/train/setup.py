"""From a validated config to the objects of a run: policy, task, tokenizer, plans, engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from trace_jax.config import Config
from trace_jax.errors import UserError
from trace_jax.models.finite import require_finite
from trace_jax.models.hf import open_hf_directory
from trace_jax.models.policy import Policy
from trace_jax.models.registry import ModelConfig, Params, config_from_dict, init_params, param_shapes
from trace_jax.quantization.calibration import calibrate, choose_channels
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import QuantPlan, rollout_plan, trainer_plan
from trace_jax.rl.corrections import Correction
from trace_jax.rl.losses import PolicyLoss
from trace_jax.rollout.embedded.engine import require_cache_formats
from trace_jax.rollout.engine import Engine, send_weights
from trace_jax.rollout.engine_setup import EngineSetup
from trace_jax.rollout.prompts import SamplingSettings
from trace_jax.rollout.weight_sync import layer_updates
from trace_jax.rollout.weight_update import Ack, LayerUpdate
from trace_jax.sharding.mesh import device_mesh
from trace_jax.sharding.rules import check_heads_and_blocks, shardings
from trace_jax.tasks import Task, load_task
from trace_jax.tokenizers import BUILT_IN, Tokenizer, load_tokenizer
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.hf_policy import HfParams
from trace_jax.train.objective import ObjectiveSpec
from trace_jax.train.placed_params import placed_params
from trace_jax.train.read_checkpoint import locate_checkpoint, policy_from_meta, read_meta
from trace_jax.train.sft import worked_example
from trace_jax.train.update import UpdateSettings

COMPUTE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class Setup(EngineSetup):
    """The fixed parts of a run: those of its engines, and the trainer's."""

    tokenizer: Tokenizer
    task: Task
    objective: ObjectiveSpec
    sampling: SamplingSettings

    def updates(self, max_length: int) -> UpdateSettings:
        """How sequences of at most `max_length` tokens are trained on."""
        algorithm = self.config.algorithm
        return UpdateSettings(
            spec=self.objective,
            micro_batch_tokens=self.config.train.micro_batch_tokens,
            max_length=max_length,
            replay=algorithm.routing_replay and bool(self.policy.config.moe_layer_ids),
            aggregation=algorithm.aggregation,
            loss_scale_factor=algorithm.loss_scale_factor or self.config.rollout.max_new_tokens,
        )

    def require_rows(self) -> None:
        """Refuses, before anything is written, a run that would read an empty split.

        Raises:
          UserError: a split has no rows.
        """
        for split in ("train", self.config.eval.split) if self.config.eval.every else ("train",):
            self.task.rows(split)

    def max_sequence_tokens(self) -> int:
        """Longest sequence the run can produce: the longest prompt of any split plus the answer limit.

        Raises:
          UserError: a prompt exceeds `rollout.max_prompt_tokens`, or the context once the answer is added.
        """
        rows = [row for split, size in self.task.sizes.items() if size for row in self.task.rows(split)]
        lengths = [len(self.tokenizer.apply_prompt(row.prompt)) for row in rows]
        longest, limit = max(lengths), self.sampling.max_prompt_tokens
        text = " ".join(rows[lengths.index(longest)].question.split())[:60]
        if limit is not None and longest > limit:
            raise UserError(
                f"the prompt {text!r} has {longest} tokens, more than rollout.max_prompt_tokens={limit}; raise it or filter the task's rows"
            )
        context = self.policy.config.max_position
        if longest + self.sampling.max_new_tokens > context:
            raise UserError(
                f"the prompt {text!r} has {longest} tokens; with rollout.max_new_tokens={self.sampling.max_new_tokens} that exceeds "
                f"the context of {context} (model.config.max_position); shorten prompts or answers"
            )
        return longest + self.sampling.max_new_tokens


def build_setup(config: Config, loaded_model: tuple[str, ModelConfig] | None = None, task: Task | None = None) -> Setup:
    """Builds the fixed parts.

    Args:
      config: validated config.
      loaded_model: family and config of a policy that is read from disk; None takes `model.config`.
      task: the config's task where it is loaded already.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if loaded_model is None:
        values = {"vocab_size": tokenizer.vocab_size} | dict(config.model.config)
        family, model_config = config.model.family, config_from_dict(config.model.family, values)
    else:
        family, model_config = loaded_model
        _require_agreement(config, model_config)
    if model_config.vocab_size < tokenizer.vocab_size:
        model = "model.config" if loaded_model is None else "the loaded policy"
        remedy = "raise it or choose another tokenizer" if loaded_model is None else "choose the tokenizer the policy was trained with"
        raise UserError(
            f"vocab_size={model_config.vocab_size} of {model} is smaller than the {tokenizer.vocab_size} tokens of tokenizer "
            f"{config.tokenizer!r}; {remedy}"
        )
    policy = Policy(
        family, model_config, COMPUTE_DTYPES[config.model.compute_dtype], config.model.experts_implementation, config.train.remat
    )
    rollout, quant = config.rollout, config.train_quant
    if model_config.num_experts % rollout.partial_sums or model_config.num_heads * model_config.head_dim % rollout.partial_sums:
        raise UserError(
            f"rollout.partial_sums is {rollout.partial_sums}, which does not divide the model's {model_config.num_experts} experts and "
            f"its {model_config.num_heads} heads of {model_config.head_dim}; write 1 or a common divisor"
        )
    plan = rollout_plan(
        rollout.weights, rollout.activations, rollout.kv_cache.k, rollout.kv_cache.v, rollout.activation_scale == "per_token"
    )
    _require_sites(policy, plan)
    algorithm, correction = config.algorithm, config.algorithm.correction
    objective = ObjectiveSpec(
        policy=policy,
        plan=trainer_plan(plan, quant.weights, quant.activations, quant.down_input, quant.kv_cache),
        loss=PolicyLoss(algorithm.loss, algorithm.ratio_level, algorithm.clip_low, algorithm.clip_high, algorithm.clip_c),
        correction=Correction(correction.kind, correction.level, correction.cap, correction.lower_bound),
    )
    sampling = SamplingSettings(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_prompt_tokens)
    return Setup(config, policy, plan, tokenizer=tokenizer, task=task or load_config_task(config), objective=objective, sampling=sampling)


def _require_sites(policy: Policy, plan: QuantPlan) -> None:
    """Refuses a rollout that is to round what the family does not have.

    Raises:
      UserError: FP4 experts of a dense family, or a rounded cache that holds no keys and values.
    """
    require_cache_formats(policy, plan)
    rounded = [key for key, fmt in (("weights", plan.weights), ("activations", plan.expert_input.format)) if fmt != "bf16"]
    if rounded and not policy.config.moe_layer_ids:
        raise UserError(
            f"rollout.{rounded[0]} rounds routed experts, and {policy.family} has none; write bf16 for rollout.weights and "
            "rollout.activations"
        )


def _require_agreement(config: Config, loaded: ModelConfig) -> None:
    """A config may repeat the shape of the policy it loads, but not contradict it."""
    stored = loaded.to_dict()
    for name, value in config.model.config.items():
        if stored.get(name) != value:
            raise UserError(
                f"model.config.{name} is {value!r}, but the loaded policy has {stored.get(name, 'no such field')!r}; "
                "remove the key or load another model.source"
            )


def load_config_task(config: Config) -> Task:
    """The task that a config names."""
    task = config.task
    return load_task(
        task.name,
        dict(task.params),
        prompt_template=task.prompt_template,
        question_pattern=task.question_pattern,
        reward=task.reward,
        seed=config.seed,
        verifier_timeout_s=task.verifier_timeout_s,
    )


def initial_policy(config: Config, task: Task | None = None) -> tuple[Setup, Params, Multipliers]:
    """The policy a run starts from: `model.source`, or random parameters from the run's seed.

    Args:
      config: validated config.
      task: as in `build_setup`.

    Raises:
      UserError: the source is neither a run, a checkpoint nor a Hugging Face directory, its weights are not finite, or they were
        trained with another tokenizer.
    """
    source = config.model.source
    if source is None:
        setup = build_setup(config, task=task)
        mesh = training_mesh(config, setup.policy.family, setup.policy.config)
        family, model_config = setup.policy.family, setup.policy.config
        placed = None if mesh is None else shardings(param_shapes(family, model_config), mesh)
        return setup, init_params(family, model_config, jax.random.key(config.seed), placed), {}
    path = Path(source)
    if (path / "config.json").is_file():
        if config.tokenizer in BUILT_IN and (path / "tokenizer.json").is_file():
            _require_tokenizer(config, source, source)
        with open_hf_directory(path) as opened:
            family, model_config = opened.family, opened.config
            mesh = training_mesh(config, family, model_config)
            params = placed_params(HfParams.of(opened), param_shapes(family, model_config), mesh)
        require_finite(params, source)
        return build_setup(config, (family, model_config), task), params, {}
    policy = policy_from_meta(read_meta(locate_checkpoint(path)))
    loaded = load_policy(path, training_mesh(config, policy.family, policy.config))
    _require_tokenizer(config, source, loaded.tokenizer)
    require_finite(loaded.params, source)
    return build_setup(config, (loaded.policy.family, loaded.policy.config), task), loaded.params, loaded.multipliers


def training_mesh(config: Config, family: str, model: ModelConfig) -> Mesh | None:
    """The mesh that a run trains on; None for one device.

    Raises:
      UserError: the devices are not there, a parameter cannot be divided, or a head or a quantization block would lie on two of them.
    """
    mesh = device_mesh(dict(config.mesh))
    if mesh is not None:
        check_heads_and_blocks(dict(mesh.shape), model, (config.rollout.weights, config.rollout.activations))
        shardings(param_shapes(family, model), mesh)
    return mesh


def _require_tokenizer(config: Config, source: str, trained: str) -> None:
    """Other ids than those the policy learned would train without a word of complaint.

    Two folders are compared by their tokenizer.json, so it does not matter how a path is written or where a copy lies.
    """
    if config.tokenizer == trained:
        return
    if not {config.tokenizer, trained} & set(BUILT_IN):
        files = [Path(folder) / "tokenizer.json" for folder in (config.tokenizer, trained)]
        # A folder that has been moved cannot be compared; the one that the config names is then taken at its word.
        if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
            return
    raise UserError(
        f"the policy of {source} was trained with tokenizer {trained}, the config says {config.tokenizer}; write tokenizer: {trained}"
    )


def calibrated(setup: Setup, params: Params) -> Multipliers:
    """Static multipliers from the task's own training rows and their worked answers."""
    return calibrate(setup.policy, params, calibration_sequences(setup), setup.config.calibration.headroom)


def compensated(setup: Setup, params: Params, multipliers: Multipliers) -> Setup:
    """The setup with its rollout's compensated channels: those it has if they are as many as the config asks for, else chosen now."""
    if setup.has_channels():
        return setup
    fraction = setup.config.rollout.residual_compensation.fraction
    sequences = calibration_sequences(setup) if 0 < fraction < 1 else []
    return replace(setup, channels=choose_channels(setup.policy, setup.rollout_plan, params, multipliers, sequences, fraction))


def calibration_sequences(setup: Setup) -> list[list[int]]:
    """Token ids of the first training rows with their worked answers."""
    rows = setup.task.prompts("train", 0, setup.config.calibration.prompts)
    return [worked_example(row, setup.tokenizer)[0] for row in rows]


def weight_updates(setup: Setup, params: Params, multipliers: Multipliers) -> Iterator[LayerUpdate]:
    """Weights as the run's engine takes them."""
    return layer_updates(setup.policy, setup.rollout_plan, params, multipliers)


def sync_weights(engine: Engine, setup: Setup, params: Params, multipliers: Multipliers, version: int) -> Ack:
    """Sends the weights and compares the engine's count and checksum with the sender's.

    Raises:
      RuntimeError: the engine received something else.
    """
    return send_weights(engine, weight_updates(setup, params, multipliers), version)
