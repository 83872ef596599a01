"""Round a float tensor the way the rollout engine rounded it, with a straight-through gradient."""
