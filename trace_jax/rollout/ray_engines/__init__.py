"""`rollout.launcher: ray`: several engines as actors of a Ray cluster, seen by the trainer as one engine."""
