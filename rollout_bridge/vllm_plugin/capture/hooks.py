"""What the rounding sites of the plugin call. Without a capture or a replay nothing happens.

A site rounds in one place, shows the codes and scales that it made there, and uses the ones that it gets back.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from rollout_bridge.vllm_plugin.numerics import Quantized


@runtime_checkable
class Observer(Protocol):
    """A capture or a replay."""

    @property
    def active(self) -> bool:
        """Whether the present forward is observed."""
        ...

    def observe(self, site: str, layer: int, quantized: Quantized | None) -> Quantized | None:
        """See `observe`."""
        ...


_observer: Observer | None = None


def install(observer: Observer | None) -> None:
    """From now on sites are observed by this one; None for nobody."""
    global _observer
    _observer = observer


def require_free() -> None:
    """Raises RuntimeError if somebody observes already."""
    if _observer is not None:
        raise RuntimeError("a capture or a replay is active; stop it first")


def active() -> bool:
    """Whether the present forward is observed: sites then need codes, not only rounded values."""
    return _observer is not None and _observer.active


def observe(site: str, layer: int, quantized: Quantized | None, x: Tensor) -> Quantized | None:
    """Shows what a site made of its input.

    Args:
      site: `expert_input`, `k` or `v`.
      layer: global layer id.
      quantized: codes and scales with one row a token; None if the site does not round.
      x: the input, [rows, ...].

    Returns:
      What the site must use: under a replay the recorded codes where there are any, otherwise `quantized`.

    Raises:
      RuntimeError: the capture's plan wants the site, and it does not round.
    """
    return quantized if _observer is None else _observer.observe(site, layer, quantized)
