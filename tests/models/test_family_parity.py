"""Every family against transformers on tiny random checkpoints that transformers saved itself: logits, gradients of a loss, cached decode.

Run with `-s` to see the largest difference of each case.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_families import COMMON_HF, FAMILIES

from trace_jax.layers.attention import causal_mask
from trace_jax.layers.logprobs import logits_of
from trace_jax.models.hf import HfCheckpoint, load_hf_directory, save_hf_directory
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.key_map import FLOAT32_LEAVES, flatten
from trace_jax.models.policy import Policy
from trace_jax.quantization.plan import UNQUANTIZED
from trace_jax.rollout import Request, generate
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.rollout.weight_sync import layer_updates

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
TOKENS = np.random.default_rng(7).integers(3, 53, (2, 19))
QUICK = ("llama3_rope", "groups", "plain_query_one_group", "every_second_same_heads")
CASES = [(family, "base") for family in FAMILIES] + [
    pytest.param(family, case, marks=[] if case in QUICK else pytest.mark.slow) for family, made in FAMILIES.items() for case in made.cases
]


def oracle(family: str, case: str = "base") -> Any:
    """A transformers model in float32 of which every parameter and buffer of the checkpoint is random."""
    known = FAMILIES[family]
    names = [f"{known.transformers}{kind}Config" for kind in ("Text", "")]
    config_type = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    changes = COMMON_HF | known.hf | known.cases.get(case, {})
    config = config_type(**changes, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{known.transformers}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


def loaded(model: Any, directory: Path) -> HfCheckpoint:
    model.save_pretrained(directory)
    return load_hf_directory(directory)


def logits(checkpoint: HfCheckpoint, params: Any, tokens: np.ndarray = TOKENS, implementation: str = "ragged") -> jax.Array:
    return _logits(params, jnp.asarray(tokens, jnp.int32), policy=Policy(checkpoint.family, checkpoint.config, "float32", implementation))


@functools.partial(jax.jit, static_argnames=("policy",))
def _logits(params: Any, ids: jax.Array, *, policy: Policy) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    inputs = ForwardInputs(ids, positions, causal_mask(positions, jnp.ones_like(ids)), {})
    return logits_of(policy.forward(params, inputs, policy.options(UNQUANTIZED)).hidden, policy.head(params))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits(tmp_path: Path, family: str, case: str) -> None:
    model = oracle(family, case)
    checkpoint = loaded(model, tmp_path)
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS)).logits.numpy()
    implementations = ("dense", "ragged") if family == "gpt_oss" else ("ragged",)
    for implementation in implementations:
        difference = float(np.max(np.abs(expected - np.asarray(logits(checkpoint, checkpoint.params, implementation=implementation)))))
        print(f"\n| {family}, {case}, {implementation} | {difference:.2e} | {np.abs(expected).max():.2f} |", end="")
        assert difference <= TOLERANCE * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_mean_cross_entropy(tmp_path: Path, family: str) -> None:
    """transformers saves its gradients as if they were weights, so our reader sorts them into our tree."""
    model = oracle(family)
    checkpoint = loaded(model, tmp_path / "weights")
    tokens = torch.from_numpy(TOKENS)
    scores = model(tokens).logits[:, :-1]
    torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens[:, 1:].reshape(-1)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected = flatten(loaded(model, tmp_path / "gradients").params)

    def loss(params: Any) -> jax.Array:
        log_probs = jax.nn.log_softmax(logits(checkpoint, params)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_probs, jnp.asarray(TOKENS[:, 1:, None], jnp.int32), axis=-1))

    found, worst = flatten(jax.grad(loss)(jax.tree.map(jnp.asarray, checkpoint.params))), 0.0
    for path, theirs in expected.items():
        if path[-1] in FLOAT32_LEAVES:
            assert not np.any(found[path]), "it only ranks experts"
            continue
        ours = np.asarray(found[path])
        axes = tuple(range(1, ours.ndim)) if path[0] == "groups" else None  # layer by layer
        difference = np.max(np.abs(ours - theirs), axis=axes) / np.maximum(np.max(np.abs(theirs), axis=axes), 1e-6)
        worst = max(worst, float(np.max(difference)))
    print(f"\n| gradients, {family} | {worst:.2e} | relative to the largest entry of the tensor |", end="")
    assert worst <= 10 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decode(tmp_path: Path, family: str) -> None:
    """Log-probabilities of what the engine draws, token by token through its cache, are transformers' for the whole sequence."""
    model = oracle(family)
    checkpoint = loaded(model, tmp_path)
    policy = Policy(checkpoint.family, checkpoint.config, "float32", "ragged")
    engine = EmbeddedEngine(policy, UNQUANTIZED, CaptureSpec())
    engine.update_weights(layer_updates(policy, UNQUANTIZED, jax.tree.map(jnp.asarray, checkpoint.params), {}), 0)
    prompts = [TOKENS[0, :3], TOKENS[1, :11]]
    requests = [
        Request(i, i, i, prompt.astype(np.int32), 13, seed=i, temperature=3.0, stop_token_ids=(99,)) for i, prompt in enumerate(prompts)
    ]
    answers = generate(engine, requests)
    worst, differing = 0.0, 0.0
    for row in range(2):
        part = slice(*answers.offsets[row : row + 2])
        tokens, sampled = answers.tokens[part].astype(np.int64), answers.sampled[part]
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.from_numpy(tokens[None])).logits[0] / 3.0, -1).numpy()
        theirs = expected[np.arange(tokens.size - 1), tokens[1:]][sampled[1:]]
        ours = answers.logprobs[part][sampled]
        worst = max(worst, float(np.max(np.abs(ours - theirs))))
        differing = max(differing, float(np.max(np.abs(ours - np.roll(theirs, 1)))))
    print(f"\n| cached decode, {family} | {worst:.2e} | control, shifted: {differing:.2e} |", end="")
    assert worst <= TOLERANCE and differing > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_we_write(tmp_path: Path, family: str) -> None:
    model = oracle(family)
    checkpoint = loaded(model, tmp_path / "theirs")
    save_hf_directory(tmp_path / "ours", *checkpoint, dtype="float32", max_shard_bytes=20_000)
    read, info = type(model).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(read.state_dict()[name].numpy(), tensor.numpy(), err_msg=name)
    with torch.no_grad():
        np.testing.assert_array_equal(read(torch.from_numpy(TOKENS)).logits, model(torch.from_numpy(TOKENS)).logits)


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_control_swapped_layers_show(tmp_path: Path, family: str) -> None:
    model = oracle(family)
    checkpoint = loaded(model, tmp_path)
    expected = np.asarray(logits(checkpoint, checkpoint.params))
    swapped = copy.deepcopy(checkpoint.params)
    stack = max(checkpoint.config.stacks, key=lambda stack: len(stack.layer_ids))
    tree = swapped
    for key in stack.path:
        tree = tree[key]
    for path, leaf in flatten(tree).items():
        if path[-1] == "o_proj":
            leaf[[0, 1]] = leaf[[1, 0]]
    assert np.max(np.abs(np.asarray(logits(checkpoint, swapped)) - expected)) > 100 * TOLERANCE
