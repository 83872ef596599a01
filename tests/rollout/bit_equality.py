"""Compares generated with teacher-forced numbers: codes bit for bit, log-probs by their largest gap; prints JSON.

Run with the XLA flag of the conformance tests.
"""

import json
from dataclasses import replace

import jax
import numpy as np
import tiny_policy as tiny

from trace_jax.rollout import generate

PLAN = tiny.PLANS["nvfp4"]


def main() -> None:
    """Generates a wave, scores it, and counts what differs."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    trajectories = generate(tiny.engine(PLAN, kind="codes"), tiny.requests())
    batch = tiny.batch_of(trajectories)
    logp, _ = tiny.score(batch, tiny.guided(PLAN))
    captured = tiny.captured(batch, PLAN, "bfloat16")
    assert batch.guides is not None
    valid = np.asarray(batch.guides.valid)
    codes = {name: np.asarray(site.data)[:, valid] for name, site in batch.guides.sites.items()}

    def shift(site):
        return replace(site, data=tiny.shifted(site.data), scales=tiny.shifted(site.scales))

    shifted, _ = tiny.score(tiny.with_guides(batch, shift), tiny.guided(PLAN))
    alone = generate(tiny.engine(PLAN, kind="codes", max_batch=None), tiny.requests()[3:4])
    together = trajectories.select([3])
    result = {
        "log_probs": int(np.asarray(batch.sampled).sum()),
        "log_prob_gap": float(tiny.gap(batch, logp).max()),
        "codes": sum(array.size for array in codes.values()),
        "unequal_codes": sum(int(np.count_nonzero(codes[name] != captured[name].codes[:, valid])) for name in codes),
        "unequal_tokens_alone": int(np.count_nonzero(alone.tokens != together.tokens)),
        "log_prob_gap_alone": float(np.abs(alone.logprobs - together.logprobs).max()),
        "unequal_shifted": int(np.count_nonzero(tiny.gap(batch, shifted))),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
