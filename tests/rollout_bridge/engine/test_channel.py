"""Messages over a socket pair: whole, in order, until the other side ends."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from rollout_bridge.vllm_plugin.serve.channel import Channel, ChannelClosed


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield Channel(ours), Channel(theirs), theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(pair):
    ours, theirs, _ = pair
    sent = [{"type": "a", "tokens": list(range(n)), "text": "ü\n", "id": 2**64 - 1, "logprob": -0.1} for n in (0, 1, 500)]
    for message in sent:
        theirs.send(message)
    assert [ours.receive(1.0) for _ in sent] == sent
    started = time.monotonic()
    assert ours.receive(0.0) is None and ours.receive(0.05) is None
    assert 0.04 < time.monotonic() - started < 5


def test_a_message_in_pieces(pair):
    ours, _, raw = pair
    text = b'{"type":"a"}'
    framed = struct.pack("<I", len(text)) + text
    for byte in range(len(framed)):
        assert ours.receive(0.0) is None
        raw.send(framed[byte : byte + 1])
    assert ours.receive(1.0) == {"type": "a"}


def test_two_sides_that_both_send_much_do_not_block_each_other(pair):
    ours, theirs, _ = pair
    message = {"type": "a", "tokens": [123456789] * 60_000}  # far more than a socket holds
    received = []

    def talk(side):
        side.send(message, 20.0)
        received.append(side.receive(20.0))

    threads = [threading.Thread(target=talk, args=(side,)) for side in (ours, theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == [message, message]


def test_what_was_sent_before_the_end_is_received(pair):
    ours, theirs, _ = pair
    theirs.send({"type": "last"})
    ours.send({"type": "unread"})  # makes the kernel reset the connection
    theirs.close()
    with pytest.raises(ChannelClosed):
        for _ in range(3):
            ours.send({"type": "nobody hears this"})
    assert ours.receive(1.0) == {"type": "last"}
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)


def test_half_a_message_is_none(pair):
    ours, theirs, raw = pair
    raw.send(struct.pack("<I", 100) + b"{")
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)


def test_a_side_that_does_not_read_is_noticed(pair):
    with pytest.raises(TimeoutError, match="made no room for a message of"):
        pair[0].send({"type": "a", "tokens": [1] * 1_000_000}, 0.1)


def test_something_else_on_the_socket_is_noticed(pair):
    ours, _, raw = pair
    raw.send(b"INFO: loading the model")
    with pytest.raises(ValueError, match="none of ours"):
        ours.receive(1.0)
