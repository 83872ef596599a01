import builtins
import io
import json
import math
import os
import resource

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from trace_jax.errors import UserError
from trace_jax.metrics import JsonlWriter, open_writers, read_metrics
from trace_jax.metrics.console import ConsoleWriter


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_a_step_and_nan_is_null(tmp_path):
    with open_writers(tmp_path / "run", []) as log:
        log.write(0, {"eval/validation/pass_at_1": 0.25, "eval/validation/precision": "nvfp4"})
        log.write(1, {"loss": np.float32(0.5), "n": jnp.int32(3), "nan": math.nan, "inf": jnp.float32(jnp.inf), "ok": np.bool_(True)})
    path = tmp_path / "run" / "metrics.jsonl"
    assert lines(path) == [
        {"step": 0, "eval/validation/pass_at_1": 0.25, "eval/validation/precision": "nvfp4"},
        {"step": 1, "loss": 0.5, "n": 3, "nan": None, "inf": None, "ok": True},
    ]
    rows = read_metrics(tmp_path / "run")
    assert rows[1]["loss"] == 0.5 and math.isnan(rows[1]["nan"])


def test_a_step_is_written_once(tmp_path):
    with open_writers(tmp_path, []) as log:
        log.write(3, {"loss": 1.0})
        with pytest.raises(ValueError, match="step 3 comes after step 3"):
            log.write(3, {"grad_norm": 1.0})
    # Also after reopening the file.
    with open_writers(tmp_path, []) as log, pytest.raises(ValueError, match="step 2 comes after step 3"):
        log.write(2, {"loss": 1.0})


def test_arrays_and_the_key_step_are_refused(tmp_path):
    with open_writers(tmp_path, []) as log:
        with pytest.raises(ValueError, match="'x' must be a scalar or text"):
            log.write(0, {"x": np.zeros(2)})
        with pytest.raises(ValueError, match="'step' is the key"):
            log.write(0, {"step": 1.0})
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_killed_inside_a_write_then_resumed(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    with open_writers(tmp_path, []) as log:
        for step in range(1, 6):
            log.write(step, {"loss": float(step)})
    os.truncate(path, path.stat().st_size - cut)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    # The checkpoint is older than the last complete line: steps 3 and 4 run again and must be there once.
    with open_writers(tmp_path, [], after_step=2) as log:
        for step in range(3, 6):
            log.write(step, {"loss": 10.0 * step})
    assert [(row["step"], row["loss"]) for row in lines(path)] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_truncate_after_drops_everything_or_nothing(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {})
    writer.truncate_after(7)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    writer.truncate_after(0)
    assert read_metrics(tmp_path) == []
    writer.write(1, {"again": 1})
    writer.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "again": 1}]


@pytest.mark.parametrize("room", [0, 7])
def test_a_full_disk_leaves_the_complete_steps(tmp_path, room):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"loss": 1.0})
    # The file may grow by a few bytes only: the operating system itself cuts the write short, as a full disk does.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
    try:
        with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written \(.*\); free space"):
            writer.write(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n'
    writer.write(2, {"loss": 2.0})
    writer.close()
    assert [row["step"] for row in lines(path)] == [1, 2]


@pytest.mark.parametrize("content", ["not json\n", "[1, 2]\n", '{"loss": 1}\n', '{"step": "one"}\n', '{"step": 1}\n\x00\n{"step": 2}\n'])
def test_a_foreign_line_is_named_and_not_overwritten(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    number = 2 if content.startswith('{"step": 1}') else 1
    for use in (lambda: read_metrics(tmp_path), lambda: open_writers(tmp_path, [])):
        with pytest.raises(UserError, match=f"metrics.jsonl:{number}: not a metrics line"):
            use()
    assert path.read_text() == content


def test_no_metrics_file(tmp_path):
    with pytest.raises(UserError, match="no metrics here"):
        read_metrics(tmp_path)


def console_text(step, metrics):
    console = Console(record=True, width=60, file=io.StringIO())
    ConsoleWriter(console).write(step, metrics)
    return console.export_text()


def test_the_console_shows_one_line_a_step():
    metrics = {"loss": 0.51, "reward/mean": 0.25, "rollout_corr/k3_kl": 1.23e-4, "eval/validation/pass_at_1": 0.5}
    text = console_text(12, metrics | {"grad_norm": math.nan})
    assert text.count("\n") == 1
    assert text.split() == "step 12 loss 0.5100 reward 0.250 kl 1.2e-04 grad nan eval validation 0.500".split()


def test_the_console_shows_the_cold_start():
    text = console_text(10, {"sft/loss": 1.25, "sft/pass_at_1": 0.5, "grad_norm": 2.0})
    assert text.split() == "step 10 loss 1.2500 pass 0.500 grad 2".split()


def test_tensorboard_file_holds_the_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    with open_writers(tmp_path, ["tensorboard"]) as log:
        log.write(4, {"reward/mean": 0.75, "note": "text", "missing": math.nan})
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, values, offset = file.read_bytes(), {}, 0
    while offset < len(data):  # TFRecord: u64 length, u32 crc, data, u32 crc
        length = int.from_bytes(data[offset : offset + 8], "little")
        event = event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])  # pyright: ignore[reportAttributeAccessIssue]  (made at import)
        values |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        offset += length + 16
    assert values[("reward/mean", 4)] == 0.75
    assert not any(tag == "missing" for tag, _ in values)


def test_missing_tensorboardx_names_the_package(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tensorboardX":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install tensorboardX"):
        open_writers(tmp_path, ["tensorboard"])


def test_unknown_logger(tmp_path):
    with pytest.raises(UserError, match="'wandbb' is unknown; write tensorboard"):
        open_writers(tmp_path, ["wandbb"])
