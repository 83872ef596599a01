"""Tasks: questions, their splits and order, and the rewards of answers.

Light to import (no jax): the verifier's worker processes import this package.
"""

from trace_jax.tasks.load import load_task
from trace_jax.tasks.row import SPLITS, Row, Split, Verdict
from trace_jax.tasks.task import Task

__all__ = ["SPLITS", "Row", "Split", "Task", "Verdict", "load_task"]
