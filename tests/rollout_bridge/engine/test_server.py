"""The server's decisions, message by message: what runs, what waits, and which version drew which token."""

from __future__ import annotations

import pytest

from rollout_bridge.engine.messages import request_message
from rollout_bridge.vllm_plugin.serve.server import Server
from tests.rollout_bridge.engine.script_answers import requests
from tests.rollout_bridge.engine.scripted import REFUSED, ScriptedGenerator


class Versions(ScriptedGenerator):
    """Takes any update."""

    def update_weights(self, ring, version):
        if ring == "bad":
            raise ValueError("bad\nweights")
        if ring == "worse":
            raise RuntimeError("half loaded")
        return {"count": 1, "checksum": "0", "version": version}


class Talk:
    """A server, and what it says."""

    def __init__(self):
        self.said = []
        self.server = Server(Versions({}), self.said.append)

    def __call__(self, kind, **fields):
        self.server.handle({"type": kind, **fields})
        said = list(self.said)
        self.said.clear()
        return said

    def steps(self, count):
        for _ in range(count):
            assert self.server.busy
            self.server.advance()
        said = list(self.said)
        self.said.clear()
        return said


@pytest.fixture
def talk():
    talk = Talk()
    assert talk("update_weights", call=0, ring="x", version=4) == [{"type": "reply", "call": 0, "count": 1, "checksum": "0", "version": 4}]
    assert talk("resume", call=1) == [{"type": "reply", "call": 1}]
    return talk


def submitted(count=3, **changes):
    return [request_message(number, request) for number, request in enumerate(requests(count, **changes))]


def test_a_server_begins_paused():
    talk = Talk()
    assert talk("submit", requests=submitted()) == [] and not talk.server.busy
    talk("resume", call=0)
    assert talk.server.busy


def test_versions_of_an_answer_over_an_update(talk):
    talk("submit", requests=submitted(2, max_new_tokens=5))
    assert talk.steps(2) == []
    talk("update_weights", call=2, ring="x", version=7)
    finished = talk.steps(3)
    assert [message["versions"] for message in finished] == [[[4, 2], [7, 3]]] * 2
    assert [len(message["tokens"]) for message in finished] == [5, 5]


def test_wait_finishes_what_runs_and_holds_what_comes(talk):
    talk("submit", requests=submitted(2, max_new_tokens=3))
    assert talk("pause", call=2, mode="wait") == []
    late = [{**message, "id": 10 + message["id"]} for message in submitted(1)]
    assert talk("submit", requests=late) == []
    said = talk.steps(3)
    assert [message["type"] for message in said] == ["finished", "finished", "reply"] and said[-1]["call"] == 2
    assert not talk.server.busy
    talk("resume", call=3)
    assert [message["id"] for message in talk.steps(3)] == [10]
    assert talk("pause", call=4, mode="wait") == [{"type": "reply", "call": 4}]  # nothing runs


def test_keep_freezes_and_abort_ends(talk):
    talk("submit", requests=submitted(2, max_new_tokens=3))
    talk.steps(1)
    assert talk("pause", call=2, mode="keep") == [{"type": "reply", "call": 2}] and not talk.server.busy
    talk("submit", requests=[{**submitted(1)[0], "id": 9}])
    talk("resume", call=3)
    assert talk("abort", call=4, ids=[1, 77]) == [{"type": "reply", "call": 4}]
    assert [message["id"] for message in talk.steps(2)] == [0]
    assert talk("pause", call=5, mode="abort") == [{"type": "reply", "call": 5}] and not talk.server.busy
    talk("resume", call=6)
    assert not talk.server.busy


def test_a_refused_update_is_an_answer_and_a_damaged_engine_is_none(talk):
    assert talk("update_weights", call=2, ring="bad", version=5) == [{"type": "reply", "call": 2, "error": "bad weights"}]
    (health,) = talk("health", call=3)
    assert health["version"] == 4
    with pytest.raises(RuntimeError, match="half loaded"):
        talk("update_weights", call=4, ring="worse", version=5)


def test_a_prompt_that_is_not_taken_stops_no_other(talk):
    bad, good = submitted(2)
    assert talk("submit", requests=[{**bad, "tokens": [REFUSED]}, good]) == [
        {"type": "refused", "id": 0, "message": "this prompt is not taken"}
    ]
    assert [message["id"] for message in talk.steps(good["max_new_tokens"])] == [1]


def test_a_long_silence_is_broken(talk, monkeypatch):
    monkeypatch.setattr("rollout_bridge.vllm_plugin.serve.server.ALIVE_S", 0.0)
    talk("submit", requests=submitted(2, max_new_tokens=3))
    (alive,) = talk.steps(1)
    assert alive == {"type": "alive", "running": 2, "waiting": 0, "paused": None, "version": 4, "steps": 1}
