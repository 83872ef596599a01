"""The launch files: each against its schema or parser, and the variables, environments and shared memory that a run needs."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from trace_jax.config.load import from_mapping

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "configs" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
OVERRIDE = re.compile(r"\b(?:rollout|train|mesh)(?:\.\w+)+=")

Require = Callable[[str], ModuleType]


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))


def jobs() -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document["spec"] for document in documents() if document["kind"] == "Job"}


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", ["1.27", "1.36"])
def test_kubernetes_objects_fit_their_schemas(version: str, require: Require):
    schemas: Any = require("kubernetes_validate")
    for document in documents():
        assert schemas.validate(document, version, strict=True) == version
    wrong = documents()[-1] | {"spec": documents()[-1]["spec"] | {"completion": 1}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, version, strict=True)


def test_a_trainer_pod_knows_its_processes():
    job = jobs()["trace-jax-trainer"]
    environment = {entry["name"]: entry.get("value") for entry in container(job)["env"]}
    service = next(document for document in documents() if document["kind"] == "Service")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    first = f"trace-jax-trainer-0.{service['metadata']['name']}"
    assert environment["JAX_COORDINATOR_ADDRESS"] == f"{first}:{ports['jax']}"
    assert int(environment["JAX_NUM_PROCESSES"] or 0) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": "trace-jax-trainer"}
    (command,) = container(job)["args"]
    assert f"rollout.ray.address={first}:{ports['ray']}" in command and "rollout.vllm.python=/opt/vllm/bin/python" in command
    engines, gpus = jobs()["trace-jax-engine"], container(jobs()["trace-jax-engine"])["resources"]["limits"]["nvidia.com/gpu"]
    wanted = int(re.findall(r"rollout\.engines=(\d+)", command)[0]) * job["completions"]  # so many of each trainer
    assert wanted == engines["completions"] * int(gpus)
    assert "/opt/vllm/bin/python -m pip install" in (LAUNCH / "Dockerfile.engine").read_text()


@pytest.mark.parametrize("name", ["trace-jax-trainer", "trace-jax-engine"])
def test_a_pod_has_shared_memory_and_the_cluster_s_secret(name: str):
    job = jobs()[name]
    mounts = {mount["mountPath"]: mount["name"] for mount in container(job)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in job["template"]["spec"]["volumes"]}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory" and int(shared["sizeLimit"].removesuffix("Gi")) >= 16
    assert all(mount in volumes for mount in mounts.values())
    environment = {entry["name"]: entry for entry in container(job)["env"]}
    assert environment["RAY_AUTH_MODE"]["value"] == "token" and "secretKeyRef" in environment["RAY_AUTH_TOKEN"]["valueFrom"]


def test_dockerfiles_parse_and_share_a_python(require: Require):
    """Ray's actors run the trainer's code: both images start from one base."""
    parser: Any = require("dockerfile")
    images = [parser.parse_file(str(LAUNCH / f"Dockerfile.{name}")) for name in ("trainer", "engine")]
    assert {command.cmd.upper() for image in images for command in image} == {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}
    assert images[0][0].cmd.upper() == "FROM" and images[0][0].value == images[1][0].value
    for image in images:
        copied = [command.value[0] for command in image if command.cmd.upper() == "COPY"]
        assert copied == [".", "configs/launch/ray-node.sh"] and (LAUNCH / "ray-node.sh").exists()
    installed = {extra for image in images for command in image for extra in re.findall(r'"\.\[(.*?)\]"', " ".join(command.value))}
    assert installed == {"cuda13,ray", "ray"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cuda13", "ray"} <= extras.keys() and f'"{extras["vllm"][0]}"' in (LAUNCH / "Dockerfile.engine").read_text()
    with pytest.raises(parser.GoParseError):
        parser.parse_string("ENV lonely")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(script: Path):
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert "set -euo pipefail" in script.read_text() and os.access(script, os.X_OK)
    for quoted in re.findall(r"bash -c \\?\s*'([^']+)'", script.read_text()):
        assert subprocess.run(["bash", "-n"], input=quoted, text=True, capture_output=True).returncode == 0


@pytest.mark.parametrize("file", ["slurm.sh", "kubernetes.yaml"])
def test_every_override_is_a_key_of_the_config(file: str):
    keys = {match.rstrip("=") for match in OVERRIDE.findall((LAUNCH / file).read_text())}
    assert {"rollout.launcher", "rollout.ray.address", "rollout.vllm.python"} <= keys
    values = {"rollout.launcher": "ray", "rollout.engine": "vllm", "rollout.engines": "2"}
    config = from_mapping({"model": {"source": "somewhere"}}, [f"{key}={values.get(key, 'x')}" for key in sorted(keys)])
    assert config.rollout.launcher == "ray"


def test_slurm_without_hosts_for_engines_says_so(tmp_path: Path):
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "TRAINERS": "2"}
    ended = subprocess.run(["bash", LAUNCH / "slurm.sh", "c.yaml"], env=environment, text=True, capture_output=True, cwd=tmp_path)
    assert ended.returncode == 2 and "leave none for the engines; write sbatch --nodes=3" in ended.stderr
