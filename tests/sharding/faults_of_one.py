"""One of two processes, of which only one meets an error: `python faults_of_one.py FOLDER`, with the variables of `launch_of`.

Prints as JSON what each of them is told. Every fault once left the other process waiting for ever.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trace_jax.sharding.processes import gathered, is_first, join

join()

import jax  # noqa: E402
from on_meshes import policy_of, tiny  # noqa: E402

from tests.train.conftest import VALUES  # noqa: E402
from trace_jax.config.load import from_mapping  # noqa: E402
from trace_jax.errors import UserError  # noqa: E402
from trace_jax.rollout.embedded.decode import CaptureSpec  # noqa: E402
from trace_jax.rollout.embedded.engine import EmbeddedEngine  # noqa: E402
from trace_jax.rollout.engine import generate  # noqa: E402
from trace_jax.rollout.prompts import score  # noqa: E402
from trace_jax.rollout.shared_engine import SharedEngine  # noqa: E402
from trace_jax.rollout.weight_sync import layer_updates  # noqa: E402
from trace_jax.rollout.weight_update import LayerUpdate  # noqa: E402
from trace_jax.sharding.mesh import device_mesh  # noqa: E402
from trace_jax.sharding.placement import put_params  # noqa: E402
from trace_jax.tasks import Row, Verdict  # noqa: E402
from trace_jax.tokenizers import load_tokenizer  # noqa: E402
from trace_jax.train.run_folder import open_run  # noqa: E402

PLAN = tiny.PLANS["nvfp4"]


class Refusing(EmbeddedEngine):
    """Refuses an update after its first layer in process 1, and a request in process 0."""

    refuses = False

    def update_weights(self, updates: Iterator[LayerUpdate], version: int) -> Any:
        if self.refuses and jax.process_index() == 1:
            next(updates)
            raise ValueError("no room for the second layer")
        return super().update_weights(updates, version)

    def poll(self, timeout: float = 0.0) -> Any:
        if self.refuses and jax.process_index() == 0:
            raise MemoryError("no room for a wave")
        return super().poll(timeout)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise MemoryError("no room for a copy")


def told(action: Callable[[], Any]) -> str:
    """The kind and message of the error that an action ends with."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def of_gathering(me: int) -> dict[str, Any]:
    """Sizes below, at and above a multiple of the chunk; and a value that cannot be sent."""
    values = [bytes(range(256)) * count for count in (0, 1, 4, 9)]
    return {
        "chunks": all(gathered((me, value[me:]), chunk) == [(i, value[i:]) for i in (0, 1)] for value in values for chunk in (64, 1024)),
        "unpicklable": told(lambda: gathered(Unpicklable() if me else 0)),
    }


def of_an_engine() -> dict[str, Any]:
    """An update whose layers are brought together from a mesh, and a poll; afterwards the engine works."""
    policy, params, multipliers = policy_of(implementation="ragged")
    mesh = device_mesh({"expert": 2})
    assert mesh is not None
    divided = put_params(mesh, params)
    local = Refusing(policy, PLAN, CaptureSpec(), 8)
    shared = SharedEngine(local)

    def updates() -> Iterator[LayerUpdate]:
        return layer_updates(policy, PLAN, divided, multipliers)

    shared.update_weights(updates(), 0)
    local.refuses = True
    found = {"update": told(lambda: shared.update_weights(updates(), 1)), "poll": told(lambda: generate(shared, tiny.requests()))}
    local.refuses = False
    local.abort(range(100))
    local.poll()
    shared = SharedEngine(local)
    return found | {"after": shared.update_weights(updates(), 2).version, "served": generate(shared, tiny.requests()).num_sequences}


def of_a_reward(me: int) -> str:
    """A verifier that process 1 lacks."""

    def score_batch(rows: Any, texts: Any) -> list[Verdict]:
        if me:
            raise UserError("task.reward math needs math-verify")
        return [Verdict(1.0, True)] * len(rows)

    trajectories = generate(tiny.engine(PLAN, "float32"), tiny.requests())
    rows = [Row(0, "q", "a")] * trajectories.num_sequences
    task: Any = SimpleNamespace(score_batch=score_batch)
    return told(lambda: score(trajectories, rows, task, load_tokenizer("ascii")))


def of_a_folder(folder: Path) -> dict[str, Any]:
    """What only process 0 writes: a device that is full, in place of the metrics, the answers, and the config."""
    config = from_mapping(VALUES)

    def full(step: int, metrics: Any) -> None:
        raise OSError(28, "No space left on device", str(folder / "metrics.jsonl"))

    def record() -> None:
        with open_run(config, folder / "record", resume=False, report=full) as run:
            run.begin()
            run.record(1, {})

    def answers() -> None:
        with open_run(config, folder / "answers", resume=False, report=None) as run:
            run.begin()
            if is_first():
                (folder / "answers" / "rollouts").symlink_to("/dev/full")
            run.write_rollouts(1, iter([{}]))

    def begin() -> None:
        with open_run(config, folder / "begin", resume=False, report=None) as run:
            if is_first():
                (folder / "begin" / "config.yaml").mkdir()
            run.begin()

    return {"record": told(record), "answers": told(answers), "begin": told(begin)}


if __name__ == "__main__":
    index = jax.process_index()
    result = of_gathering(index) | of_an_engine() | {"reward": of_a_reward(index)} | of_a_folder(Path(sys.argv[1]))
    print(json.dumps(result | {"pid": os.getpid()}))
