"""The table of model families and the functional face every family shares.

Parameters travel as a plain nested dict of arrays (`nnx.to_pure_dict`); the NNX module exists only while a forward pass
is traced.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from trace_jax.errors import UserError
from trace_jax.models.decoder import ApplyLayer, run_decoder, run_layer
from trace_jax.models.decoder_config import DecoderConfig, Stack
from trace_jax.models.deepseek_v3.config import DeepseekV3Config
from trace_jax.models.glm4_moe.config import Glm4MoeConfig
from trace_jax.models.gpt_oss.config import GptOssConfig
from trace_jax.models.inputs import ForwardInputs, ForwardOptions, ForwardOutput
from trace_jax.models.key_map import Entry
from trace_jax.models.layer_scope import Reports
from trace_jax.models.llama.config import LlamaConfig
from trace_jax.models.mixtral.config import MixtralConfig
from trace_jax.models.modules import Decoder
from trace_jax.models.olmoe.config import OlmoeConfig
from trace_jax.models.qwen3.config import Qwen3Config
from trace_jax.models.qwen3_5_moe.config import Qwen35MoeConfig
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.sharding.axes import constrain

Params = dict[str, Any]
"""Nested dict of parameters."""

ModelConfig = DecoderConfig
"""Config of any supported family."""

FAMILIES: dict[str, type[ModelConfig]] = {
    config.FAMILY: config
    for config in (
        Qwen3MoeConfig, Qwen35MoeConfig, OlmoeConfig, MixtralConfig, GptOssConfig, Glm4MoeConfig, DeepseekV3Config,
        Qwen3Config, LlamaConfig,
    )
}  # fmt: skip
"""Family name -> its config class. The modules `modeling`, `params` and `hf_config` of `trace_jax.models.<family>` hold the rest."""


@dataclass(frozen=True)
class Family:
    """The functions of a family: its decoder, that of a layer, and its names in Hugging Face checkpoints."""

    make: Callable[..., Decoder]
    layer_function: Callable[..., ApplyLayer]
    key_map: Callable[..., list[Entry]]


@functools.cache
def family_of(name: str) -> Family:
    """Looks a family up by name.

    Raises:
      UserError: there is no such family.
    """
    if name not in FAMILIES:
        raise UserError(f"model.family {name!r} is not supported; write one of: {', '.join(FAMILIES)}")
    modeling = importlib.import_module(f"trace_jax.models.{name}.modeling")
    params = importlib.import_module(f"trace_jax.models.{name}.params")
    return Family(modeling.make, modeling.layer_function, params.key_map)


def config_from_dict(family: str, values: dict[str, Any]) -> ModelConfig:
    """Builds a family's config from a mapping (the `model.config` of a YAML file)."""
    family_of(family)
    return FAMILIES[family].from_dict(values)


@functools.cache
def _skeleton(family: str, config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: family_of(family).make(config, nnx.Rngs(0))))


@functools.cache
def _layer_skeleton(family: str, config: ModelConfig, path: tuple[str | int, ...]) -> tuple[Any, Any]:
    module: Any = nnx.eval_shape(lambda: family_of(family).make(config, nnx.Rngs(0)))
    for key in path:
        module = getattr(module, key) if isinstance(key, str) else module[key]
    return nnx.split(module)


def init_params(family: str, config: ModelConfig, key: PRNGKeyArray, placed: Any = None) -> Params:
    """Random float32 parameters, the same wherever they are.

    Args:
      placed: a sharding for each parameter; None puts all on the default device.
    """

    @functools.partial(jax.jit, out_shardings=placed)
    def build(key: PRNGKeyArray) -> Params:
        return nnx.to_pure_dict(nnx.state(family_of(family).make(config, nnx.Rngs(params=key)), nnx.Param))

    return build(key)


def param_shapes(family: str, config: ModelConfig) -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct` leaves."""
    return nnx.to_pure_dict(_skeleton(family, config)[1])


def apply(family: str, config: ModelConfig, params: Params, inputs: ForwardInputs, options: ForwardOptions) -> ForwardOutput:
    """The forward pass of a family as a pure function of its parameters."""
    return run_decoder(bind(family, config, params), config, inputs, options, family_of(family).layer_function(config, inputs))


def apply_layer(
    family: str, config: ModelConfig, params: Params, stack: Stack, x: Float[Array, "B T D"], inputs: ForwardInputs, options: ForwardOptions
) -> tuple[Float[Array, "B T D"], Reports]:
    """One layer alone, so that a model need not be in memory to be run.

    Args:
      params: of the layer, with a leading axis of one, as below `stack.path` in the whole tree.
      stack: a stack of one layer (`Stack.only`).
      x: residual stream before the layer.

    Returns:
      The residual stream after it, and what was asked for, with a leading axis of one.
    """
    graphdef, state = _layer_skeleton(family, config, stack.path)
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    module = nnx.merge(graphdef, state)
    return run_layer(module, stack, config, x, inputs, options, family_of(family).layer_function(config, inputs))


def output_head(family: str, config: ModelConfig, params: Params) -> Float[Array, "V D"]:
    """The matrix that turns hidden states into logits."""
    return constrain(params["embed" if config.tie_embeddings else "lm_head"]["weight"], "tensor")


def bind(family: str, config: ModelConfig, params: Params) -> Decoder:
    """The NNX module that holds `params`."""
    graphdef, state = _skeleton(family, config)
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def key_map(family: str, config: ModelConfig) -> list[Entry]:
    """Hugging Face name, shape, path and position of every tensor of a checkpoint, in file order."""
    return family_of(family).key_map(config)
