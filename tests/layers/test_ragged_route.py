"""What the experts' exchange asks of `ragged_all_to_all`, against its documentation written out in NumPy.

XLA executes the collective on GPUs only, and refuses it on CPUs (jax 0.10 and 0.11); so the arguments of every device are computed here,
and what the documentation says happens to them is done to them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.layers.expert_parallel import Route

NAMES = ("operand", "output", "input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def exchanged(arguments: dict[str, np.ndarray]) -> np.ndarray:
    """The results of all devices, whose arguments are stacked along the first axis; one slice for each pair of devices.

    Raises:
      AssertionError: the two sides of a pair do not agree, or slices leave their array or lie on one another.
    """
    a = arguments
    devices = a["operand"].shape[0]
    result, written = a["output"].copy(), np.zeros(a["output"].shape[:2], int)
    np.testing.assert_array_equal(a["send_sizes"], a["recv_sizes"].T)  # send_sizes == all_to_all(recv_sizes)
    for source in range(devices):
        for target in range(devices):
            start, place = (int(a[name][source, target]) for name in ("input_offsets", "output_offsets"))
            size = int(a["send_sizes"][source, target])
            assert 0 <= start <= start + size <= a["operand"].shape[1] and 0 <= place <= place + size <= result.shape[1]
            result[target, place : place + size] = a["operand"][source, start : start + size]
            written[target, place : place + size] += 1
    assert written.max() <= 1
    return result


def arguments_of(action: Any, rows: np.ndarray, sizes: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """What each device passes to the collective."""
    found: dict[int, tuple[np.ndarray, ...]] = {}

    def recorded(*arguments: Any, axis_name: str) -> Any:
        jax.debug.callback(lambda me, *own: found.update({int(me): own}), jax.lax.axis_index(axis_name), *arguments)
        return arguments[1]

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", recorded)
    jax.vmap(lambda part: action(Route(jnp.asarray(sizes), sizes[0].sum().item(), True), part), axis_name="expert")(jnp.asarray(rows))
    jax.effects_barrier()
    monkeypatch.undo()
    return {name: np.stack([np.asarray(found[device][index]) for device in range(len(found))]) for index, name in enumerate(NAMES)}


def test_the_documentation_s_example():
    """The oracle itself."""
    arguments = {
        "operand": [[1, 2, 2], [3, 4, 0]],
        "output": [[0] * 4] * 2,
        "input_offsets": [[0, 1], [0, 1]],
        "send_sizes": [[1, 2], [1, 1]],
        "output_offsets": [[0, 0], [1, 2]],
        "recv_sizes": [[1, 1], [2, 1]],
    }
    results = exchanged({name: np.asarray(value) for name, value in arguments.items()})
    assert results.tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_rows_reach_their_device_and_come_back(devices, seed, monkeypatch):
    """Uneven shares, some of them empty: the same places as in padded slots, and every row back where it was."""
    rng = np.random.default_rng(seed)
    room = 12
    sizes = np.stack([rng.multinomial(room, rng.dirichlet(np.full(devices, 0.5))) for _ in range(devices)]).astype(np.int32)
    rows = rng.normal(size=(devices, room, 3)).astype(np.float32)
    arguments = arguments_of(lambda route, part: route.send(part, fill=-1), rows, sizes, monkeypatch)
    received = exchanged(arguments)
    slots = jax.vmap(lambda part: Route(jnp.asarray(sizes), room, False).send(part, fill=-1), axis_name="expert")(jnp.asarray(rows))
    np.testing.assert_array_equal(received, np.asarray(slots))
    returned = exchanged(arguments_of(lambda route, part: route.send_back(part), received, sizes, monkeypatch))
    np.testing.assert_array_equal(returned, rows)
    wrong = arguments | {"output_offsets": arguments["input_offsets"]}  # where the rows stand at the sender: the likely mistake
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(exchanged(wrong), np.asarray(slots))
