"""What the plugin reads and refuses before vLLM builds anything: settings, and vLLM's version. Without vLLM, without torch."""

from __future__ import annotations

import re

import pytest

from rollout_bridge.vllm_plugin.settings import Settings, parse_settings
from rollout_bridge.vllm_plugin.versions import SUPPORTED, require_supported


def test_what_is_missing_is_off():
    assert parse_settings(None) == parse_settings({}) == parse_settings({"kv_cache": {}}) == Settings("bf16", "bf16", 0.0)
    asked = {"kv_cache": {"v": "nvfp4"}, "residual_compensation": {"fraction": 1, "selection": "l2"}}
    assert parse_settings(asked) == Settings("bf16", "nvfp4", 1.0)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"kv": {}}, "trace_jax has no key 'kv'; the keys are kv_cache, residual_compensation"),
        ({"kv_cache": "nvfp4"}, "trace_jax.kv_cache is 'nvfp4'; write an object with the keys k, v"),
        ({"kv_cache": {"k": "fp4"}}, "trace_jax.kv_cache.k is 'fp4'; write one of bf16, nvfp4"),
        ({"kv_cache": {"keys": "nvfp4"}}, "trace_jax.kv_cache has no key 'keys'; the keys are k, v"),
        ({"residual_compensation": {"fraction": 1.5}}, "fraction is 1.5; write a number from 0 to 1"),
        ({"residual_compensation": {"fraction": True}}, "fraction is True; write a number from 0 to 1"),
        ({"residual_compensation": {"fraction": "half"}}, "fraction is 'half'; write a number from 0 to 1"),
        ({"residual_compensation": {"selection": "max"}}, "selection is 'max'; write 'l2'"),
    ],
)
def test_a_mistake_is_one_line_with_what_to_write(asked, line):
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        parse_settings(asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.0+cpu"])
def test_known_releases_pass(version):
    assert require_supported(version) == version


@pytest.mark.parametrize("version", ["0.25.1", "0.3.2", "0.320.0", "1.26.0", "0.33.0rc1"])
def test_others_are_named_with_those_that_would_do(version):
    with pytest.raises(RuntimeError, match=re.escape(f"vLLM {version} is installed")) as caught:
        require_supported(version)
    assert all(known in str(caught.value) for known in SUPPORTED) and "\n" not in str(caught.value)


def test_no_vllm_at_all_is_named(monkeypatch):
    monkeypatch.setattr("rollout_bridge.vllm_plugin.versions.DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(RuntimeError, match="no vLLM is installed and trace-jax supports 0.26, 0.32; install"):
        require_supported()
