"""What an update of a Qwen3-MoE model must consist of, for the model that this engine runs: names, types and shapes.

The names are Hugging Face's, except that the experts of a layer travel stacked (leading axis E) under the name without the expert's
number. Two names stand for all experts of a layer: `mlp.experts.input_scale` (gate and up) and `mlp.experts.down_proj.input_scale`.
"""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

BLOCKS = {"nvfp4": 16, "mxfp4": 32}
"""Values of a block scale."""

Experts: TypeAlias = Literal["plain", "nvfp4", "mxfp4"]
"""What the experts of a layer are; plain: of the engine's own type."""

Kind: TypeAlias = Literal["float", "codes", "nvfp4_scales", "mxfp4_scales", "multiplier", "kv_scale"]
"""float: finite values; codes: two FP4 codes a byte; nvfp4_scales: E4M3 bytes, positive or zero; mxfp4_scales: E8M0 bytes; multiplier:
finite and positive; kv_scale: a multiplier that bfloat16 holds, in which vLLM keeps it."""


class TensorSpec(NamedTuple):
    """NumPy's name of the type, shape and meaning of a tensor, and whether every update has it."""

    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    required: bool = True


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """What decides about the tensors of an update.

    Args:
      dtype: of weights that are not quantized: "bfloat16" or "float32".
      experts: of each layer.
      input_scales: whether NVFP4 experts round their inputs, which takes static scales (W4A4).
      kv_scales: whether vLLM has a place for scales of K and V; others are then refused.
      required_kv: those of "k" and "v" whose scale an update must have.
      tied: whether the output head is the embedding.
      qkv_bias: whether the projections of attention have a bias; vLLM has none for the output projection.
    """

    dtype: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    expert_hidden_size: int
    experts: tuple[Experts, ...]
    input_scales: bool = True
    kv_scales: bool = True
    required_kv: tuple[str, ...] = ()
    tied: bool = False
    qkv_bias: bool = False


def expected_tensors(layout: ModelLayout) -> dict[str, TensorSpec]:
    """Name -> what the tensor must be, for every tensor that an update may have."""
    table = (layout.vocab_size, layout.hidden_size)
    specs = {"model.embed_tokens.weight": table, "model.norm.weight": (layout.hidden_size,)}
    if not layout.tied:
        specs["lm_head.weight"] = table
    tensors = {name: TensorSpec(layout.dtype, shape, "float") for name, shape in specs.items()}
    for layer, experts in enumerate(layout.experts):
        parts = _attention_and_norms(layout) | (_plain_experts(layout) if experts == "plain" else _fp4_experts(layout, experts))
        tensors |= {f"model.layers.{layer}.{name}": spec for name, spec in parts.items()}
    return tensors


def _attention_and_norms(layout: ModelLayout) -> dict[str, TensorSpec]:
    width, head = layout.hidden_size, layout.head_dim
    rows = {"q": layout.num_heads * head, "k": layout.num_kv_heads * head, "v": layout.num_kv_heads * head}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate.weight": (layout.num_experts, width),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.o_proj.weight": (width, layout.num_heads * head),
    }
    shapes |= {f"self_attn.{name}_proj.weight": (size, width) for name, size in rows.items()}
    if layout.qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    specs = {name: TensorSpec(layout.dtype, shape, "float") for name, shape in shapes.items()}
    if layout.kv_scales:
        specs |= {f"self_attn.{name}_proj.{name}_scale": TensorSpec("float32", (), "kv_scale", name in layout.required_kv) for name in "kv"}
    return specs


def _projections(layout: ModelLayout) -> dict[str, tuple[int, int, int]]:
    experts, width, hidden = layout.num_experts, layout.hidden_size, layout.expert_hidden_size
    return {"gate_proj": (experts, hidden, width), "up_proj": (experts, hidden, width), "down_proj": (experts, width, hidden)}


def _plain_experts(layout: ModelLayout) -> dict[str, TensorSpec]:
    return {f"mlp.experts.{name}.weight": TensorSpec(layout.dtype, shape, "float") for name, shape in _projections(layout).items()}


def _fp4_experts(layout: ModelLayout, fmt: Literal["nvfp4", "mxfp4"]) -> dict[str, TensorSpec]:
    specs = {}
    for name, (experts, rows, columns) in _projections(layout).items():
        prefix = f"mlp.experts.{name}"
        specs[f"{prefix}.weight"] = TensorSpec("uint8", (experts, rows, columns // 2), "codes")
        specs[f"{prefix}.weight_scale"] = TensorSpec("uint8", (experts, rows, columns // BLOCKS[fmt]), f"{fmt}_scales")
        if fmt == "nvfp4":
            specs[f"{prefix}.weight_scale_2"] = TensorSpec("float32", (experts,), "multiplier")
    if layout.input_scales and fmt == "nvfp4":
        specs |= {f"mlp.experts.{name}": TensorSpec("float32", (), "multiplier") for name in ("input_scale", "down_proj.input_scale")}
    return specs
