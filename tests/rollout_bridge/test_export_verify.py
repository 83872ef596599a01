"""`--verify` finds what is wrong and names the first tensor; a failed verification leaves no export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_policy import multipliers
from tiny_policy import CONFIG

from rollout_bridge.export import ExportSettings, export_checkpoint, run, verify_export
from trace_jax.errors import UserError
from trace_jax.train.stored_policy import StoredPolicy, open_stored_policy


@pytest.fixture(scope="module")
def stored(run_folder: Path) -> StoredPolicy:
    return open_stored_policy(run_folder)


@pytest.fixture
def copy(exported: Callable, tmp_path: Path) -> Callable[..., tuple[Path, ExportSettings]]:
    """`copy("nvfp4")`: an export that a test may damage."""

    def make(fmt: str) -> tuple[Path, ExportSettings]:
        made = exported(fmt)
        return Path(shutil.copytree(made.path, tmp_path / "copy")), made.settings

    return make


def check(directory: Path, settings: ExportSettings, stored: StoredPolicy) -> int:
    scales = {site: np.asarray(values) for site, values in multipliers().items() if site in settings.sites}
    return verify_export(directory, stored.policy, settings, stored.params, scales)


def change(directory: Path, name: str, edit: Callable[[np.ndarray], None]) -> None:
    """Edits the bytes of one tensor in its file."""
    for path in directory.glob("*.safetensors"):
        data = np.memmap(path, np.uint8, "r+")
        length = int.from_bytes(bytes(data[:8]), "little")
        entry = json.loads(bytes(data[8 : 8 + length])).get(name)
        if entry is not None:
            begin, end = entry["data_offsets"]
            edit(data[8 + length + begin : 8 + length + end])
            data.flush()
            return
    raise AssertionError(name)


def flip(data: np.ndarray) -> None:
    data[5 % data.size] ^= 1


def test_a_good_export_is_compared_whole(exported: Callable, stored: StoredPolicy) -> None:
    for fmt in ("nvfp4", "mxfp4", "bf16"):
        made = exported(fmt)
        of_experts = 2 * 3 * CONFIG.num_experts * CONFIG.num_layers if fmt == "nvfp4" else 0
        extra = of_experts + (0 if fmt == "bf16" else 2 * CONFIG.num_layers)
        assert check(made.path, made.settings, stored) == made.result["values_verified"]
        assert made.result["values_verified"] == stored.params.num_bytes // 4 + extra


@pytest.mark.parametrize(
    ("fmt", "name"),
    [
        ("nvfp4", "model.layers.1.mlp.experts.4.up_proj.weight"),
        ("mxfp4", "model.layers.2.mlp.experts.0.down_proj.weight_packed"),
        ("nvfp4", "model.layers.0.mlp.gate.weight"),
        ("nvfp4", "model.layers.2.mlp.experts.5.down_proj.input_scale"),
        ("mxfp4", "model.layers.1.self_attn.v_proj.v_scale"),
        ("bf16", "lm_head.weight"),
    ],
)
def test_one_flipped_bit_is_found_and_named(copy: Callable, stored: StoredPolicy, fmt: str, name: str) -> None:
    directory, settings = copy(fmt)
    change(directory, name, flip)
    with pytest.raises(UserError, match=rf"verification failed: {name.removesuffix('_packed')}: 1 of \d+ values differ") as caught:
        check(directory, settings, stored)
    assert "\n" not in str(caught.value)


def test_the_first_of_several_is_named(copy: Callable, stored: StoredPolicy) -> None:
    directory, settings = copy("nvfp4")
    for layer in (2, 1):
        change(directory, f"model.layers.{layer}.mlp.experts.3.gate_proj.weight", flip)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.experts\.3"):
        check(directory, settings, stored)


def test_swapped_block_scales_and_a_divisor_for_a_multiplier_are_found(copy: Callable, stored: StoredPolicy) -> None:
    directory, settings = copy("nvfp4")

    def invert(data: np.ndarray) -> None:
        value = data.view(np.float32) if data.flags.aligned else np.frombuffer(bytes(data), np.float32)
        data[:] = np.frombuffer((1 / np.asarray(value)).astype(np.float32).tobytes(), np.uint8)

    change(directory, "model.layers.0.mlp.experts.2.gate_proj.weight_scale_2", invert)
    with pytest.raises(UserError, match=r"experts\.2\.gate_proj\.weight: \d+ of 2048"):
        check(directory, settings, stored)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -0.5])
def test_a_scale_that_is_none_is_found_also_for_a_dead_expert(copy: Callable, stored: StoredPolicy, value: float) -> None:
    directory, settings = copy("nvfp4")
    name = "model.layers.1.mlp.experts.2.down_proj.input_scale"
    change(directory, name, lambda data: data.__setitem__(slice(None), np.frombuffer(np.float32(value).tobytes(), np.uint8)))
    with pytest.raises(UserError, match=f"{name} is .*not finite and positive"):
        check(directory, settings, stored)


@pytest.mark.parametrize("edit", ["router", "kv", "group"])
def test_a_config_that_says_something_else_is_found(copy: Callable, stored: StoredPolicy, edit: str) -> None:
    directory, settings = copy("nvfp4")
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    quantization = config["quantization_config"]
    if edit == "router":
        quantization["ignore"].remove("model.layers.1.mlp.gate")
    elif edit == "kv":
        quantization["kv_cache_scheme"] = {"num_bits": 4, "type": "float"}
    else:
        quantization["group_size"] = 32
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantization_config"):
        check(directory, settings, stored)


def test_a_missing_file_is_found(copy: Callable, stored: StoredPolicy) -> None:
    directory, settings = copy("mxfp4")
    sorted(directory.glob("*.safetensors"))[1].unlink()
    with pytest.raises(UserError, match="verification failed: .*index.json and the files disagree"):
        check(directory, settings, stored)


def test_an_export_of_another_format_is_found(exported: Callable, stored: StoredPolicy) -> None:
    with pytest.raises(UserError, match=r"verification failed: model\.layers\.0\.mlp\.experts\.0\.down_proj\.input_scale is None"):
        check(exported("bf16").path, ExportSettings("nvfp4"), stored)


def test_a_failed_verification_leaves_no_export(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run.encoded_tensors

    def wrong(*arguments: Any) -> Any:
        for name, tensor in whole(*arguments):
            yield name, tensor * 2 if name == "model.norm.weight" else tensor

    monkeypatch.setattr(run, "encoded_tensors", wrong)
    with pytest.raises(UserError, match=r"model\.norm\.weight: 64 of 64 values differ"):
        export_checkpoint(run_folder, tmp_path / "out", ExportSettings("bf16"), verify=True)
    assert list(tmp_path.iterdir()) == []
