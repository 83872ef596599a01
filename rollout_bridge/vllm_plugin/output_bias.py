"""The bias of the attention's output projection, which Qwen3-MoE checkpoints with `attention_bias` have.

vLLM's model builds that projection without one and skips the tensor when it loads, without a word. Imports vllm.
"""

from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.linear import RowParallelLinear


@PluggableLayer.register_oot(name="RowParallelLinear")
class BiasedRowParallelLinear(RowParallelLinear):
    """vLLM's own layer, with a bias where the checkpoint has one."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True, **options) -> None:
        if options.get("prefix", "").endswith(".self_attn.o_proj"):
            config = get_current_vllm_config().model_config.hf_text_config
            bias = bias or (config.model_type == "qwen3_moe" and config.attention_bias)
        super().__init__(input_size, output_size, bias, **options)
