"""The median time of a call.

A program makes the call several times, each on inputs of its own, so that no cache holds the working set and nothing can be computed
once for all; the inputs are arguments of the program, so that nothing can be computed when it is compiled. Several programs are under
way before the wait, so that a dispatch costs no time as long as the device is busy.
"""

import concurrent.futures
import dataclasses
import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

_BATCHES = 5
_PROGRAMS = 8
"""Programs under way before the wait, where a program makes several calls."""


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A function and its arguments.

    Args:
      function: traceable; computes from its arguments only.
      arguments: pytrees of arrays.
      in_place: the first argument is donated, and the result takes its place in the next call.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    in_place: bool = False


class Timer:
    """Median times, each measured once: a call may be a row of its own and the peer of another.

    Args:
      calls: calls in one program; with one, a single program is waited for.
    """

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._programs: weakref.WeakKeyDictionary[Call, Callable[..., Any]] = weakref.WeakKeyDictionary()
        self._times: weakref.WeakKeyDictionary[Call, float] = weakref.WeakKeyDictionary()

    def compile(self, calls: Iterable[Call]) -> None:
        """Compiles the programs of several calls side by side; an error shows when the call is timed.

        Not for what is tuned by running it while it is compiled.
        """
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for call in calls:
                pool.submit(self._compile, self._program(call), call.arguments)

    def time_us(self, call: Call) -> float:
        """Median time of one call in microseconds."""
        if call not in self._times:
            self._times[call] = self._median_time_us(call)
        return self._times[call]

    def _program(self, call: Call) -> Callable[..., Any]:
        if call not in self._programs:
            function = call.function

            def every_call(firsts: list[Any], rests: list[Any]) -> list[Any]:
                return [function(first, *rest) for first, rest in zip(firsts, rests, strict=True)]

            self._programs[call] = jax.jit(every_call, donate_argnums=(0,) if call.in_place else ())
        return self._programs[call]

    def _compile(self, program: Any, arguments: tuple[Any, ...]) -> None:
        first, *rest = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
        program.lower([first] * self._calls, [rest] * self._calls).compile()

    def _median_time_us(self, call: Call) -> float:
        program = self._program(call)
        copies = [jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), call.arguments) for _ in range(self._calls)]
        firsts, rests = [first for first, *_ in copies], [rest for _, *rest in copies]

        def run(programs: int) -> None:
            nonlocal firsts
            results = None
            for _ in range(programs):
                results = program(firsts, rests)
                firsts = results if call.in_place else firsts
            jax.block_until_ready(results)  # a device runs its programs in order

        run(1)
        programs = _PROGRAMS if self._calls > 1 else 1
        times = []
        for _ in range(_BATCHES):
            start = time.perf_counter()
            run(programs)
            times.append((time.perf_counter() - start) / (self._calls * programs) * 1e6)
        return statistics.median(times)
