"""The bridge between the trainer and vLLM: export, wire format, and the plugin that runs inside vLLM. Nothing below imports it."""
