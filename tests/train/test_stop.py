"""The request to stop: said once, and a second Ctrl-C is a Ctrl-C."""

from __future__ import annotations

import signal

import pytest

from trace_jax.train.stop import stop_on_signal

AGAIN = "stopping after this step; again to stop at once\n"


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C is an exception, also where the shell started the tests in the background and ignores it."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_the_first_ctrl_c_asks_and_the_second_interrupts(capfd):
    with pytest.raises(KeyboardInterrupt):
        with stop_on_signal() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.asked and capfd.readouterr().err == AGAIN  # at once, not when the step ends
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_a_repeated_sigterm_is_the_same_request(capfd):
    """`timeout` sends one to the program and one to its group."""
    with stop_on_signal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked and capfd.readouterr().err == "stopping after this step\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("asked", [False, True])
def test_the_former_handlers_come_back(asked):
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with stop_on_signal() as stop:
        assert signal.getsignal(signal.SIGTERM) != former[signal.SIGTERM]
        if asked:
            signal.raise_signal(signal.SIGTERM)
        assert stop.asked == asked
    assert {number: signal.getsignal(number) for number in former} == former
