"""`comparison.yaml`: what a comparison consists of, written before the first run, so that a resumed call compares the same."""

from __future__ import annotations

from pathlib import Path

from trace_jax.comparison.plan import Comparison
from trace_jax.config.yaml_text import dump_yaml, parse_yaml
from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.train.resume import changes

STATE = "comparison.yaml"


def write_state(out: Path, comparison: Comparison, start: Path | None) -> None:
    """Stores the configs of all variants, the seeds, and the start (null: `cold-start` in the folder)."""
    state = {
        "start": None if start is None else str(start.absolute()),
        "seeds": list(comparison.seeds),
        "methods": {name: config.model_dump(mode="json") for name, config in comparison.variants.items()},
    }
    write_atomic(out / STATE, [dump_yaml(state).encode()])


def stored_start(out: Path, comparison: Comparison) -> Path | None:
    """The start of the comparison in a folder, if `comparison` is that one, perhaps with more methods or seeds.

    Raises:
      UserError: it has a changed config, or fewer methods or seeds.
    """
    state = parse_yaml((out / STATE).read_text(), str(out / STATE))
    for name, stored in state["methods"].items():
        config = comparison.variants.get(name)
        if config is None:
            raise UserError(f"--methods leaves out {name}, which the comparison in {out} has; name it too, or choose another --out")
        for key, old, new in changes(stored, config, out / STATE):
            raise UserError(
                f"{key} of method {name} is {new}, but the comparison in {out} was started with {old}; "
                f"restore {key}, or choose another --out"
            )
    if len(comparison.seeds) < len(state["seeds"]):
        had = len(state["seeds"])
        raise UserError(f"--seeds is {len(comparison.seeds)}, but the comparison in {out} has {had}; write {had} or more")
    return None if state["start"] is None else Path(state["start"])
