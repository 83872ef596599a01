"""The configuration of a run as frozen, validated models: every key, its type and its default.

Nothing here reads files or environment; `load.py` does that, `checks.py` refuses combinations that cannot work, and
`presets.py` says what each `method` stands for. A key that exists here is honoured; what is not implemented is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from trace_jax.config.layer_spec import LayerSpec, parse_layers

Format: TypeAlias = Literal["bf16", "fp8", "nvfp4", "mxfp4"]
"""Number format of a tensor in the rollout."""

FP4_FORMATS = ("nvfp4", "mxfp4")
"""Formats whose rounding a guidance record can hold."""

SITES = ("expert_input", "k", "v")
"""Sites a guidance record can hold: input of the experts' gate/up projection, keys after RoPE, values."""

Split: TypeAlias = Literal["train", "validation", "test"]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Rate: TypeAlias = Annotated[float, Field(gt=0)]
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) != len(values):
        raise ValueError("each name may appear once")
    return values


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class ModelSection(Section):
    """The policy.

    Args:
      family: a folder of `trace_jax/models`.
      source: Hugging Face folder, Orbax folder or run folder to start from; null for random weights of `config`.
      config: fields of the family's config class, checked by the family; for random weights only, a source brings its own.
      compute_dtype: dtype of the forward pass; masters are float32 always.
      experts_implementation: how routed experts are multiplied; `auto` chooses by size and device.
    """

    family: str = "qwen3_moe"
    source: str | None = None
    config: dict[str, Any] = {}
    compute_dtype: Literal["bf16", "fp32"] = "bf16"
    experts_implementation: Literal["auto", "dense", "ragged"] = "auto"


class TaskSection(Section):
    """Where prompts and rewards come from.

    Args:
      name: `reasoning_gym:DATASET`, `jsonl:FILE` or `module:callable`.
      params: arguments of the task.
      prompt_template: text with `{question}` that becomes the prompt.
      question_pattern: regular expression whose first group is the part of the question to keep; null keeps all of it.
      reward: name or import path of the reward function; null for the task's own.
      verifier_timeout_s: seconds after which the scoring of one answer is cut off and counted as an error.
    """

    name: str = "reasoning_gym:chain_sum"
    params: dict[str, Any] = {}
    prompt_template: str = "{question}"
    question_pattern: str | None = None
    reward: str | None = None
    verifier_timeout_s: Rate = 5.0


class KvCacheSection(Section):
    """Formats of the KV cache: keys after RoPE, and values."""

    k: Format = "nvfp4"
    v: Format = "nvfp4"


class ResidualSection(Section):
    """Residual compensation of the rollout's expert weights: the share of blocks kept exactly, and how they are chosen."""

    fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    selection: Literal["l2"] = "l2"


class RolloutSection(Section):
    """How answers are generated.

    Args:
      engine: `jax` (embedded) or the name of an installed engine.
      weights, activations, kv_cache: formats of the routed experts' weights and inputs and of the cache.
      scope: which linear layers are quantized.
      activation_scale: `static` (calibrated, constant for the run) or `per_token`.
      residual_compensation: correction of quantized weights.
      group_size: answers per prompt.
      prompts_per_step: prompts of one training step.
      max_new_tokens: limit of one answer in tokens.
      max_prompt_tokens: longest prompt accepted; null is the model's context less `max_new_tokens`.
      temperature: of sampling; 0 is greedy.
      top_p, top_k: truncation of the distribution; 1.0 and -1 switch it off.
      max_batch: sequences generated at the same time; null is all of them.
    """

    engine: str = "jax"
    weights: Format = "nvfp4"
    activations: Format = "nvfp4"
    kv_cache: KvCacheSection = KvCacheSection()
    scope: Literal["routed_experts"] = "routed_experts"
    activation_scale: Literal["static", "per_token"] = "static"
    residual_compensation: ResidualSection = ResidualSection()
    group_size: Positive = 8
    prompts_per_step: Positive = 16
    max_new_tokens: Positive = 64
    max_prompt_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    max_batch: Positive | None = None

    def format_of(self, site: str) -> Format:
        """Format of a recordable site: `expert_input`, `k` or `v`."""
        formats: dict[str, Format] = {"expert_input": self.activations, "k": self.kv_cache.k, "v": self.kv_cache.v}
        return formats[site]


class TrainQuantSection(Section):
    """How the trainer's forward pass rounds; formats are the rollout's.

    Args:
      weights: routed experts' weights.
      activations: input of the experts' gate/up projection.
      down_input: input of the experts' down projection; it is not recorded, so it cannot be guided.
      kv_cache: K and V.
    """

    weights: Literal["none", "rtn"] = "rtn"
    activations: Literal["none", "rtn", "guided"] = "guided"
    down_input: Literal["none", "rtn"] = "rtn"
    kv_cache: Literal["none", "rtn", "guided"] = "guided"


class AuditSection(Section):
    """Sequences recorded with full codes at all layers, for diagnosis: every so many steps (0: never), and how many."""

    every: Count = 10
    sequences: Positive = 4


class GuidanceSection(Section):
    """What the rollout records for the trainer.

    Args:
      record: `scales`, `mantissa` (one bit and the scales), `codes`, or `none`.
      layers: `all`, `last_half`, `last:N`, `first:N`, or a list of global layer ids.
      sites: which activation sites; a site that the rollout does not round to FP4 records nothing.
      audit: full-code records for diagnosis.
      cache_budget_mb: memory for records that wait for the trainer, in MiB.
    """

    record: Literal["none", "scales", "mantissa", "codes"] = "mantissa"
    layers: Annotated[LayerSpec, BeforeValidator(parse_layers)] = "last_half"
    sites: Annotated[tuple[Literal["expert_input", "k", "v"], ...], Field(strict=False), AfterValidator(_distinct)] = SITES
    audit: AuditSection = AuditSection()
    cache_budget_mb: Positive = 2048


class CorrectionSection(Section):
    """Importance weight between the rollout's and the trainer's old policy: `tis` is min(pi_old / pi_rollout, cap)."""

    kind: Literal["tis", "none"] = "tis"
    level: Literal["token"] = "token"
    cap: Rate = 5.0


class AlgorithmSection(Section):
    """The policy-gradient objective.

    Args:
      clip_low, clip_high: the ratio pi / pi_old is clipped to [1 - clip_low, 1 + clip_high].
      aggregation: `token_mean` divides by the sampled tokens of the whole batch.
      normalize_std: whether advantages are divided by the group's standard deviation.
      correction: weight against the train-versus-rollout gap.
      routing_replay: whether the trainer uses the experts that the rollout chose.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Rate = 0.28
    aggregation: Literal["token_mean"] = "token_mean"
    normalize_std: bool = True
    correction: CorrectionSection = CorrectionSection()
    routing_replay: bool = True


class TrainSection(Section):
    """How a batch becomes updates.

    Args:
      micro_batch_tokens: tokens, padding included, of one forward and backward pass.
      updates_per_batch: optimizer updates per generated batch; its prompts are split among them.
      unguided_every: steps between measurements of an unguided forward pass beside the guided one; 0 is never.
      old_logprobs: `recompute` takes old log-probs from the trainer's own forward pass before the updates.
      remat: whether layer activations are recomputed in the backward pass, to save memory.
    """

    micro_batch_tokens: Positive = 4096
    updates_per_batch: Positive = 1
    unguided_every: Count = 10
    old_logprobs: Literal["recompute"] = "recompute"
    remat: bool = True


class OptimizerConfig(Section):
    """Optax chain: global-norm clipping (0: none), then Adam or AdamW with a linear warm-up and a constant rate."""

    name: Literal["adamw", "adam"] = "adamw"
    learning_rate: Rate = 1.0e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    warmup_steps: Count = 0
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Rate = 1.0e-8


class SyncSection(Section):
    """Weight transfer to the engine, in optimizer updates: how often, and how old a sampled token may be when used."""

    every: Positive = 1
    max_staleness: Count = 0


class EvalSection(Section):
    """Held-out evaluation at the rollout's precision.

    Args:
      every: steps between evaluations; 0 is never.
      split: split of the task.
      samples: answers per prompt.
      max_prompts: prompts used, from the start of the split; null is all of them.
      greedy: the most probable token instead of sampling at `rollout.temperature`.
    """

    every: Count = 25
    split: Split = "validation"
    samples: Positive = 1
    max_prompts: Positive | None = None
    greedy: bool = False


class CalibrationSection(Section):
    """Static multipliers: real prompts used to measure the largest values, and the factor put on top of them."""

    prompts: Positive = 64
    headroom: Annotated[float, Field(ge=1)] = 1.5


class MeshSection(Section):
    """Devices along each axis; -1 is what is left."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1


class CheckpointSection(Section):
    """Steps between checkpoints, and how many are kept. The last step is always saved."""

    every: Positive = 50
    keep: Positive = 3


class SftSection(Section):
    """The supervised cold start.

    Args:
      steps: updates, at most.
      batch_size: worked answers per update.
      learning_rate, warmup_steps: of its AdamW.
      eval_every: updates between checks of the stop rule; 0 is never.
      stop_pass_rate: stop when this share of `split_for_stop` is solved; null trains all `steps`.
      split_for_stop: another split than the one results are reported on, so that stopping does not bias them.
      max_prompts: prompts of that split used for a check; null is all of them.
    """

    steps: Positive = 200
    batch_size: Positive = 128
    learning_rate: Rate = 3.0e-3
    warmup_steps: Count = 20
    eval_every: Count = 10
    stop_pass_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    split_for_stop: Split = "test"
    max_prompts: Positive | None = None


class Config(Section):
    """A complete, resolved configuration."""

    method: str = "trace"
    model: ModelSection = ModelSection()
    tokenizer: str = "byte"
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    train_quant: TrainQuantSection = TrainQuantSection()
    guidance: GuidanceSection = GuidanceSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerConfig = OptimizerConfig()
    sync: SyncSection = SyncSection()
    eval: EvalSection = EvalSection()
    calibration: CalibrationSection = CalibrationSection()
    mesh: MeshSection = MeshSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sft: SftSection = SftSection()
    loggers: Annotated[tuple[Literal["tensorboard"], ...], Field(strict=False), AfterValidator(_distinct)] = ("tensorboard",)
    steps: Positive = 200
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @property
    def recorded_sites(self) -> tuple[str, ...]:
        """Sites that the rollout records: those of `guidance.sites` that it rounds to FP4; none if `record` is none."""
        if self.guidance.record == "none":
            return ()
        return tuple(site for site in self.guidance.sites if self.rollout.format_of(site) in FP4_FORMATS)
