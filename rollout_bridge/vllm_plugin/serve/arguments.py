"""Arguments of `vllm.LLM` that this engine depends on; everything else is the user's. Imports nothing, the trainer reads it too."""

FIXED = {
    "enforce_eager": True,  # what captures records runs in Python between the kernels
    "enable_prefix_caching": False,  # a cached token is not computed again and leaves no record
    "enable_chunked_prefill": False,  # with a request's own seed, a prompt in pieces crashes the sampler on CPU
    "async_scheduling": False,  # messages are read between two steps, weights exchanged between two tokens
    "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # sampling is the request's affair, not the checkpoint's
    "weight_transfer_config": {"backend": "trace_jax"},
}

FROM_CONFIG = (
    "model",
    "dtype",
    "seed",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "additional_config",
    "tensor_parallel_size",
    "distributed_executor_backend",
)
"""Arguments that other configuration keys set."""

RESERVED = (*FIXED, *FROM_CONFIG)
