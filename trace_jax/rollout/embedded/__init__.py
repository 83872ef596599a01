"""The rollout engine that runs inside the trainer's process."""
