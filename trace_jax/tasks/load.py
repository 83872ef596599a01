"""`load_task`: from the task section of a config to a `Task`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from trace_jax.errors import UserError
from trace_jax.tasks import procedural, records
from trace_jax.tasks.importing import import_callable, nearest
from trace_jax.tasks.rewards import INLINE, ISOLATED
from trace_jax.tasks.row import Row, Split
from trace_jax.tasks.source import PLACEHOLDER, PromptForm, RawRow, split_rows
from trace_jax.tasks.task import Task
from trace_jax.tasks.verifiers import VerifierSpec


def load_task(
    name: str,
    params: Mapping[str, Any] | None = None,
    *,
    prompt_template: str = PLACEHOLDER,
    question_pattern: str | None = None,
    reward: str | None = None,
    seed: int = 0,
    verifier_timeout_s: float = 5.0,
    workers: int | None = None,
) -> Task:
    """The task of a config, all rows loaded or generated and checked.

    Args:
      name: "reasoning_gym:DATASET", "jsonl:FILE", or "module:callable" (returns rows, records or a Task).
      params: of a reasoning-gym data set its config fields and `size` (entries generated, default 2000); of a JSONL file
        `validation` and `test`, files with the rows of these splits; of a callable its keyword arguments.
      prompt_template: text around the question; `{question}` stands for it.
      question_pattern: regular expression; its group 1 replaces the question.
      reward: a name of `rewards.py` or "module:function"; None takes the data set's own score for reasoning-gym, else "auto".
      seed: of generated data sets (unless `params` has one) and of the prompt stream.
      verifier_timeout_s: seconds after which a verifier is cut off.
      workers: verifier processes at most; None takes one per CPU, at most 8.

    Raises:
      UserError: anything in the arguments or files that cannot work, with the place and the remedy.
    """
    params = dict(params or {})
    if not verifier_timeout_s > 0:
        raise UserError(f"task.verifier_timeout_s is {verifier_timeout_s}; write a number of seconds above 0")
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; write 1 or more")
    form = PromptForm.parse(prompt_template, question_pattern)
    dataset = name.removeprefix(procedural.PREFIX) if name.startswith(procedural.PREFIX) else ""
    rows, enlarge = _source(name, params, seed)
    if isinstance(rows, Task):
        if (prompt_template, question_pattern, reward) != (PLACEHOLDER, None, None):
            raise UserError(f"task {name} returns a finished Task; remove prompt_template, question_pattern and reward from its section")
        return rows
    reward = reward or ("reasoning_gym" if dataset else "auto")
    verifier = _verifier(reward, dataset, params)
    reserved: list[Split] = [split for split in ("validation", "test") if name.startswith(records.PREFIX) and split in params]
    splits, duplicates = split_rows(rows, form, reserved)
    if not any(splits.values()):
        raise UserError(f"task {name} has no rows; {enlarge}")
    if reward in (*INLINE, "math", "auto"):
        _require_answers(name, reward, chain.from_iterable(splits.values()))
    return Task(
        name,
        splits,
        reward=reward,
        verifier=verifier,
        seed=seed,
        enlarge=enlarge,
        verifier_timeout_s=verifier_timeout_s,
        workers=workers,
        duplicates=duplicates,
    )


def _verifier(reward: str, dataset: str, params: Mapping[str, Any]) -> VerifierSpec | None:
    if reward in INLINE:
        return None
    if reward == "reasoning_gym":
        if not dataset:
            raise UserError("task.reward reasoning_gym scores reasoning_gym:DATASET only; write auto, math, exact or module:function")
        return VerifierSpec("reasoning_gym", dataset, dict(params))
    if reward in ISOLATED:
        return VerifierSpec("math")
    if ":" not in reward:
        known, near = ", ".join((*INLINE, *ISOLATED)), nearest(reward, (*INLINE, *ISOLATED))
        raise UserError(f"task.reward {reward!r} is unknown{near}; write {known} or module:function")
    function = import_callable(reward, "task.reward")
    try:
        inspect.signature(function).bind("completion", "answer", "row")
    except TypeError as error:
        raise UserError(f"task.reward {reward!r} does not take (completion, answer, row): {error}; change its parameters") from error
    except ValueError:
        pass  # built-in functions may have no signature to check
    return VerifierSpec(reward)


def _source(name: str, params: dict[str, Any], seed: int) -> tuple[Iterable[RawRow] | Task, str]:
    """Raw rows (or a user's finished Task), and how to get more of them."""
    if name.startswith(procedural.PREFIX):
        size = params.get("size", procedural.DEFAULT_SIZE)
        rows = procedural.reasoning_gym_rows(name.removeprefix(procedural.PREFIX), params, seed)
        return rows, f"raise task.params.size (now {size}) or widen the data set's other parameters: too few distinct questions"
    if name.startswith(records.PREFIX):
        return _jsonl(name.removeprefix(records.PREFIX), params), (
            "add rows to the file, give rows a split field, or name files in task.params.validation and task.params.test"
        )
    if ":" in name:
        function = import_callable(name, "task.name")
        try:
            result = function(**params)
        except UserError:
            raise
        except Exception as error:
            # The user's function may fail in any way, wrong params among them.
            raise UserError(f"task.name {name!r} failed ({type(error).__name__}: {error}); mend the function or task.params") from error
        return result if isinstance(result, Task) else _returned(name, result), "let the function return more rows"
    raise UserError(f"task.name {name!r} is unknown; write reasoning_gym:DATASET, jsonl:FILE or module:callable")


def _jsonl(path: str, params: dict[str, Any]) -> Iterable[RawRow]:
    """Rows of the file and of those named for a split; what a split's own file serves is not drawn from the main file."""
    for key in params:
        if key not in ("validation", "test"):
            raise UserError(f"task.params.{key} is unknown for {records.PREFIX}{path}; it takes validation and test (files)")
        if not isinstance(params[key], str):
            raise UserError(f"task.params.{key} is {params[key]!r}; write the path of a JSON-lines file")
    files: dict[Split, str] = {split: params[split] for split in ("validation", "test") if split in params}
    named = chain.from_iterable(records.jsonl_rows(file, split) for split, file in files.items())
    return chain(named, records.jsonl_rows(path))


def _returned(name: str, result: Any) -> Iterable[RawRow]:
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise UserError(f"task {name} returned {type(result).__name__}; return a list of rows, or a Task")
    for number, row in enumerate(result):
        where = f"{name} row {number}"
        if isinstance(row, Row):
            history = None if row.messages is None else tuple(row.messages[:-1])
            question = row.question if row.messages is None else row.messages[-1]["content"]
            yield RawRow(where, question, row.answer, row.solution, None, history, row.meta)
        else:
            yield records.record_row(row, where)


def _require_answers(name: str, reward: str, rows: Iterable[Row]) -> None:
    for row in rows:
        if not row.answer.strip():
            place = f"task {name}, question {row.question[:60]!r}"
            raise UserError(f"{place}: no answer, which reward {reward} needs; set task.reward to another one")
