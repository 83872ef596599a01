"""Commands of the bridge, which `trace-jax` finds through the entry-point group `trace_jax.commands`."""
