"""`rollout.engine: NAME` is the engine that an installed package offers under that name, never the embedded one in its stead."""

from __future__ import annotations

import pytest

from trace_jax.errors import UserError
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.train.run import run_training
from trace_jax.train.setup import build_setup

MODULE = """
from trace_jax.rollout.embedded.engine import EmbeddedEngine

class Engine(EmbeddedEngine):
    made = []

def make(setup):
    engine = Engine(setup.policy, setup.rollout_plan, setup.capture(), setup.config.rollout.max_batch)
    Engine.made.append((setup, engine))
    return engine
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed distribution that offers the engine `other`."""
    site = tmp_path / "site"
    metadata = site / "other_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[trace_jax.engines]\nother = other_engine:make\n")
    (site / "other_engine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)


def test_the_factory_gets_the_setup(package, make_config):
    setup = build_setup(make_config("rollout.engine=other"))
    engine = setup.engine()
    import other_engine  # pyright: ignore[reportMissingImports]

    assert other_engine.Engine.made == [(setup, engine)] and type(engine) is other_engine.Engine
    assert type(build_setup(make_config()).engine()) is EmbeddedEngine


@pytest.mark.slow
def test_a_run_generates_with_it(package, make_config, cold_start, tmp_path):
    run_training(make_config(f"model.source={cold_start.directory}", "rollout.engine=other", "eval.every=0", "steps=1"), tmp_path / "run")
    import other_engine  # pyright: ignore[reportMissingImports]

    assert other_engine.Engine.made[-1][1].health().version == 1


def test_what_it_cannot_imitate_is_refused(package, make_config):
    with pytest.raises(UserError, match="rollout.partial_sums is 2, which only rollout.engine: jax imitates; write 1"):
        make_config("rollout.engine=other", "rollout.partial_sums=2")


def test_a_name_that_nobody_offers(package, make_config):
    with pytest.raises(UserError, match="no installed package provides; write one of: jax, other(, vllm)?$"):
        make_config("rollout.engine=another")
