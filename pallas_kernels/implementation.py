"""Which implementation of an operation runs.

`implementation=None` takes the Pallas kernel on a GPU, if it can serve the arguments, and the jnp reference elsewhere.
A named implementation is used or refused, never replaced.
"""

from collections.abc import Callable
from typing import Any

import jax


def dispatch(
    op: str,
    implementation: str | None,
    *,
    reference: Callable[[], Any],
    pallas: Callable[[], Any],
    triton: Callable[[], Any] | None = None,
) -> Any:
    """Runs the chosen implementation of an operation; each is a thunk, so that Pallas and Triton are imported only when they are used.

    Raises ValueError for an unknown name, NotImplementedError (with the reason) if the operation has no implementation of the name, or
    one that cannot serve.
    """
    if implementation is None:
        if jax.default_backend() != "gpu":
            return reference()
        try:
            return pallas()
        except NotImplementedError:
            return reference()
    named = {"reference": reference, "pallas": pallas, "triton": triton}
    if implementation not in named:
        raise ValueError(f"unknown implementation {implementation!r}; write one of {', '.join(named)} or None")
    chosen = named[implementation]
    if chosen is None:
        raise NotImplementedError(f"{op} has no {implementation} implementation; write reference, pallas or None")
    return chosen()
