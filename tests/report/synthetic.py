"""Runs with made-up metrics, for tests of the report."""

import math

import numpy as np

from trace_jax.metrics import open_writers


def write_run(run_dir, *, steps=60, seed=0, gain=0.6, guided=True):
    """A run with every metric of the design, in plausible shapes."""
    random = np.random.default_rng(seed)
    with open_writers(run_dir, []) as log:
        for step in range(steps + 1):
            progress = 1 - math.exp(-3 * step / steps)
            row: dict[str, object] = {}
            if step % 20 == 0:
                value = 0.18 + gain * progress
                row |= {
                    "eval/validation/pass_at_1": value,
                    "eval/validation/pass_at_1_low": value - 0.06,
                    "eval/validation/pass_at_1_high": value + 0.06,
                    "eval/validation/reward_mean": value,
                    "eval/validation/precision": "nvfp4 W4A4KV4",
                }
            if step:
                row |= training_row(step, progress, random, gain, guided)
            log.write(step, row)
    rounding = "guided" if guided else "rtn"
    (run_dir / "config.yaml").write_text(
        f"method: {'trace' if guided else 'qat'}\ntrain_quant: {{activations: {rounding}, kv_cache: {rounding}}}\n"
    )


def training_row(step, progress, random, gain, guided):
    noise = random.normal()
    reward = 0.18 + gain * progress + 0.05 * noise
    kl = 4e-4 * (1 + progress) * math.exp(0.3 * random.normal()) * (1 if guided else 9)
    row = {
        "loss": 0.02 * random.normal(),
        "grad_norm": 0.6 * math.exp(0.2 * random.normal()),
        "learning_rate": 1e-3,
        "reward/mean": reward,
        "reward/pass_rate": reward,
        "frac_reward_zero_std": 0.3 + 0.3 * progress,
        "response/length_mean": 18 + 6 * progress + random.normal(),
        "response/truncated_fraction": abs(0.03 * random.normal()),
        "rollout_corr/kl": kl * random.normal(),
        "rollout_corr/k3_kl": kl,
        "rollout_corr/rollout_is_ratio_fraction_high": 0.0,
        "train_rollout_logprob_abs_diff": 0.01 + 4 * kl,
        "train_rollout_logprob_abs_diff_max": 0.4 + 60 * kl,
        "router/agreement": 0.97,
        "policy/entropy": 1.2 - 0.7 * progress,
        "policy/clip_fraction": 0.01,
        "sync/version": step,
        "sync/staleness": 0.0,
        "throughput/rollout_tokens_per_s": 2000 + 100 * noise,
        "throughput/train_tokens_per_s": 3100 + 100 * noise,
        "time/rollout": 0.62,
        "time/reward": 0.02,
        "time/train": 0.41,
        "time/sync": 0.03,
        "time/audit": 0.0,
        "time/evaluate": 0.0,
        "time/checkpoint": 0.01,
        "time/step": 1.16,
    }
    if not guided:
        return row
    row |= {
        "guidance/parity_agreement": 0.985 + 0.002 * noise,
        "guidance/missing_fraction": 0.0,
        "guidance/recomputed_fraction": 0.0,
        "guidance/saturation_fraction": abs(2e-4 * noise),
        "guidance/bytes_per_token": 232.0,
        "guidance/bytes_per_token/expert_input": 104.0,
        "guidance/bytes_per_token/k": 64.0,
        "guidance/bytes_per_token/v": 64.0,
    }
    if step % 5 == 0:
        row |= {f"unguided/{name}": 9 * row[name] for name in ("rollout_corr/k3_kl", "train_rollout_logprob_abs_diff")}
    if step % 10 == 0:
        for site, level in (("expert_input", 0.955), ("k", 0.975), ("v", 0.985)):
            for layer in range(4):
                name = f"{site}/layer_{layer}"
                row[f"guidance/audit/code_agreement/{name}"] = level - 0.012 * layer + 0.002 * random.normal()
                row[f"guidance/audit/adjacent_share/{name}"] = 0.995
                row[f"guidance/audit/outside_bracket_fraction/{name}"] = 0.002
                row[f"guidance/audit/d_act/{name}"] = 0.5 * 1.3**layer
    return row
