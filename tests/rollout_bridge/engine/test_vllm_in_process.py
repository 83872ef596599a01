"""The debugging mode with vLLM itself: trainer and engine in one process, whose interpreter has both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not INTERPRETER, reason=REASON)]


def test_vllm_in_the_trainer_s_process(installed: None, tmp_path: Path):
    version = subprocess.run([INTERPRETER, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True)
    if version.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("vLLM's interpreter is of another version than this one, whose packages it borrows")
    program = Path(__file__).with_name("in_process.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [INTERPRETER, str(program), str(tmp_path), *(path for path in sys.path if path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout.splitlines()[-1])
