"""Which implementation of an operation runs.

`implementation=None` takes the Pallas kernel on a GPU, if it can serve the arguments, and the jnp reference elsewhere.
A named implementation is used or refused, never replaced.
"""

from collections.abc import Callable
from typing import Any

import jax

IMPLEMENTATIONS = ("reference", "pallas")


def dispatch(implementation: str | None, reference: Callable[[], Any], pallas: Callable[[], Any]) -> Any:
    """Runs the chosen implementation; both are thunks, so that Pallas is imported only when it is used.

    Raises ValueError for an unknown name, NotImplementedError (with the reason) if "pallas" is asked for and cannot serve.
    """
    if implementation is None:
        if jax.default_backend() != "gpu":
            return reference()
        try:
            return pallas()
        except NotImplementedError:
            return reference()
    if implementation == "reference":
        return reference()
    if implementation == "pallas":
        return pallas()
    raise ValueError(f"unknown implementation {implementation!r}; write one of {', '.join(IMPLEMENTATIONS)} or None")
