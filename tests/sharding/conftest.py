"""Programs with eight CPU devices, which a test process with one device starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.conftest import VALUES

DEVICES = "--xla_force_host_platform_device_count=8"


@pytest.fixture(scope="session")
def eight_devices(environment: dict[str, str]) -> dict[str, str]:
    """Environment of a program that has eight CPU devices."""
    return environment | {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {DEVICES}"}


@pytest.fixture(scope="session")
def run_program(eight_devices: dict[str, str]) -> Callable[..., Any]:
    """`run_program("on_meshes.py", "dense")`: runs a program of this folder on eight devices and returns the JSON it prints."""

    def run(name: str, *arguments: str) -> Any:
        command = [sys.executable, str(Path(__file__).parent / name), *arguments]
        done = subprocess.run(command, env=eight_devices, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    values = VALUES | {"model": VALUES["model"] | {"config": VALUES["model"]["config"] | {"num_kv_heads": 2}}}
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def train(environment, config_file) -> Callable[..., list[str]]:
    """`train(out, "steps=2", ...)`: the words of a training command."""
    return lambda out, *overrides: ["-m", "trace_jax", "train", str(config_file), *overrides, "--out", str(out)]
