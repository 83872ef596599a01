"""Engines whose worker follows a script: the real process, socket, loop and ring, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from rollout_bridge.engine.engine import EngineLimits, VllmEngine
from rollout_bridge.engine.in_process import InProcessLink
from rollout_bridge.engine.process import ProcessLink, WorkerCommand
from rollout_bridge.engine.records import Records
from rollout_bridge.engine.worker_folder import write_worker_folder
from tests.rollout_bridge.engine import scripted
from trace_jax.config.checks import ENGINE_GROUP

Connect = Callable[..., ProcessLink]


@pytest.fixture(scope="session")
def worker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_worker_folder(tmp_path_factory.mktemp("worker") / "folder")


@pytest.fixture
def connect(worker_folder: Path, tmp_path: Path) -> Generator[Connect, None, None]:
    """`connect(**arguments)` starts a scripted worker; `program`, `folder` and `start_timeout_s` say how."""

    def start(
        program: list[str] | None = None, folder: Path = worker_folder, start_timeout_s: float = 60.0, **arguments: Any
    ) -> ProcessLink:
        command = program or [sys.executable, scripted.__file__]
        how = WorkerCommand(command, folder, tmp_path / "vllm.log", start_timeout_s, send_timeout_s=20.0)
        links.append(ProcessLink(how, {"type": "start", "arguments": {"once": str(tmp_path / "once"), **arguments}}))
        return links[-1]

    links: list[ProcessLink] = []
    (tmp_path / "once").touch()
    yield start
    for link in links:
        link.close()


MakeEngine = Callable[..., VllmEngine]


@pytest.fixture
def make_engine(connect: Connect) -> Generator[MakeEngine, None, None]:
    """`make_engine(max_restarts=..., silence_s=..., in_process=..., records=..., channels=..., **arguments)`; closed with the test."""
    made: list[VllmEngine] = []

    def make(
        max_restarts: int = 3,
        silence_s: float = 20.0,
        in_process: bool = False,
        slot_bytes: int = 8192,
        records: Records | None = None,
        channels: dict[str, list[list[int]]] | None = None,
        **arguments: Any,
    ) -> VllmEngine:
        limits = EngineLimits(scripted.CONTEXT, scripted.VOCABULARY, slot_bytes, silence_s, max_restarts)

        def link() -> ProcessLink | InProcessLink:
            if in_process:
                return InProcessLink(
                    lambda start: scripted.ScriptedGenerator(start["arguments"]), {"type": "start", "arguments": arguments}
                )
            return connect(**arguments)

        made.append(VllmEngine(link, limits, records, channels))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """The engine is found by its name also where the project was installed before it had this engine."""
    if [point for point in entry_points(group=ENGINE_GROUP) if point.name == "vllm"]:
        yield
        return
    site = tmp_path_factory.mktemp("site")
    metadata = site / "engine_of_this_tree-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-of-this-tree\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{ENGINE_GROUP}]\nvllm = rollout_bridge.engine.factory:make\n")
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))
