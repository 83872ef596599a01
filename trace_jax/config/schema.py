"""The configuration of a run as frozen, validated models: every key, its type and its default.

The root and the sections `model` and `task` stand here, the other sections in `rollout_sections.py`, `training_sections.py`
and `run_sections.py`. Nothing here reads files or environment; `load.py` does that, `checks.py` refuses combinations that
cannot work, and `presets.py` says what each `method` stands for. A key that exists here is honoured; what is not
implemented is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from trace_jax.config.rollout_sections import GuidanceSection, RolloutSection, TrainQuantSection
from trace_jax.config.run_sections import CalibrationSection, CheckpointSection, EvalSection, MeshSection, SyncSection
from trace_jax.config.section import Positive, Rate, Section, distinct
from trace_jax.config.training_sections import AlgorithmSection, OptimizerConfig, SftSection, TrainSection
from trace_jax.quantization.plan import BLOCK_FORMATS


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

    The other keys of the section belong to the task that `name` names: `task.name=...` on the command line (or `--task`) that
    names another one starts from the defaults, not from what the file says for its own; set them on the command line too.

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
    loggers: Annotated[tuple[Literal["tensorboard"], ...], Field(strict=False), AfterValidator(distinct)] = ("tensorboard",)
    steps: Positive = 200
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @property
    def recorded_sites(self) -> tuple[str, ...]:
        """Sites that the rollout records: those of `guidance.sites` that it rounds to FP4; none if `record` is none."""
        if self.guidance.record == "none":
            return ()
        return tuple(site for site in self.guidance.sites if self.rollout.format_of(site) in BLOCK_FORMATS)

    @property
    def least_staleness(self) -> int:
        """By how many updates a token can be older than the weights that train on it when rollout and training alternate.

        A batch begins with weights at most `every` - 1 updates old, and its last update comes `updates_per_batch` - 1 later.
        """
        return self.sync.every + self.train.updates_per_batch - 2

    @property
    def asynchronous(self) -> bool:
        """Whether generation runs ahead of training: `sync.max_staleness` allows more than alternating needs."""
        return self.sync.max_staleness > self.least_staleness
