"""What an update of a Qwen3-MoE model must consist of, for the model that this engine runs: names, types and shapes.

The names are Hugging Face's, except that the experts of a layer travel stacked (leading axis E) under the name without the expert's
number. Two names stand for all experts of a layer: `mlp.experts.input_scale` (gate and up) and `mlp.experts.down_proj.input_scale`.
"""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

BLOCK = 16
"""Values of a block scale in NVFP4."""

Kind: TypeAlias = Literal["float", "codes", "block_scales", "multiplier", "kv_scale"]
"""float: finite values; codes: two FP4 codes a byte; block_scales: E4M3 bytes from 0x00 to 0x7E; multiplier: finite and positive;
kv_scale: a multiplier that bfloat16 holds, in which vLLM keeps it."""


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
      quantized: per layer, whether its experts are NVFP4.
      input_scales: whether quantized experts round their inputs by static scales (W4A4).
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
    quantized: tuple[bool, ...]
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
    for layer, quantized in enumerate(layout.quantized):
        parts = _attention_and_norms(layout) | (_nvfp4_experts(layout) if quantized else _plain_experts(layout))
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


def _nvfp4_experts(layout: ModelLayout) -> dict[str, TensorSpec]:
    specs = {}
    for name, (experts, rows, columns) in _projections(layout).items():
        prefix = f"mlp.experts.{name}"
        specs[f"{prefix}.weight"] = TensorSpec("uint8", (experts, rows, columns // 2), "codes")
        specs[f"{prefix}.weight_scale"] = TensorSpec("uint8", (experts, rows, columns // BLOCK), "block_scales")
        specs[f"{prefix}.weight_scale_2"] = TensorSpec("float32", (experts,), "multiplier")
    if layout.input_scales:
        specs |= {f"mlp.experts.{name}": TensorSpec("float32", (), "multiplier") for name in ("input_scale", "down_proj.input_scale")}
    return specs
