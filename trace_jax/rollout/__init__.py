"""Rollout: the trajectories an engine returns, and the protocol every engine speaks."""

from trace_jax.rollout.audit import Audit
from trace_jax.rollout.engine import Capabilities, Engine, Health, Request, generate
from trace_jax.rollout.routes import Routes
from trace_jax.rollout.trajectories import FinishReason, Trajectories
from trace_jax.rollout.weight_update import Ack, LayerUpdate, UpdateDigest

__all__ = [
    "Ack",
    "Audit",
    "Capabilities",
    "Engine",
    "FinishReason",
    "Health",
    "LayerUpdate",
    "Request",
    "Routes",
    "Trajectories",
    "UpdateDigest",
    "generate",
]
