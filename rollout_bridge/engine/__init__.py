"""The rollout engine that runs in a vLLM process, seen from the trainer."""
