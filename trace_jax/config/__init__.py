"""Configuration: schema, presets, loading and checks. Imports no array library, so it is quick to start."""

from trace_jax.config.checks import check, check_for_training
from trace_jax.config.layer_spec import parse_layers, resolve_layers
from trace_jax.config.load import COMMAND_LINE, dump, from_mapping, load, parse_override
from trace_jax.config.presets import ALGORITHMS, METHODS
from trace_jax.config.schema import Config

__all__ = [
    "ALGORITHMS",
    "COMMAND_LINE",
    "METHODS",
    "Config",
    "check",
    "check_for_training",
    "dump",
    "from_mapping",
    "load",
    "parse_layers",
    "parse_override",
    "resolve_layers",
]
