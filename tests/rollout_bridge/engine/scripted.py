"""A generator that follows a script instead of a model, and a worker that serves it: `python scripted.py --fd N`.

The start message's `arguments` say what goes wrong, and how long a step takes. Runs where the worker folder is all there is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from rollout_bridge.vllm_plugin.serve import loop
from rollout_bridge.vllm_plugin.serve.generator import Drawn
from rollout_bridge.vllm_plugin.weights.digest import Digest
from rollout_bridge.wire import CorruptSlot, RingReader, RingWriter, WireError
from rollout_bridge.wire.weight_records import read_header

VOCABULARY = 50
CONTEXT = 64
REFUSED = 47
"""A first token that the generator does not take."""


def token(seed: int, place: int) -> int:
    """The token that an answer has at a place."""
    return (31 * seed + 7 * place) % VOCABULARY


def logprob(place: int) -> float:
    """Its log-probability, no short decimal fraction."""
    return float(np.float32(-(place + 1) / 7))


class ScriptedGenerator:
    """One token a step for every request.

    Args:
      step_s: seconds of a step.
      dies_at, hangs_at, fails_at: step at which it is killed, sleeps or raises, if the file `once` can be removed (no file: never).
      dies_in_update, hangs_in_update, damages_update: the version in whose update it is killed, sleeps, or has a bit flipped in the ring;
        `once` as above.
      fails_to_load: what it says instead of loading.
      capture: ring that gets routes of every token, and layers and experts of a token; each expert is the number of the request.
    """

    def __init__(self, arguments: dict):
        self.arguments = arguments
        if "fails_to_load" in arguments:
            raise RuntimeError(arguments["fails_to_load"])
        time.sleep(arguments.get("load_s", 0.0))
        self.running: dict[int, dict] = {}
        self.steps = 0
        self.channels = None
        self.ring = ""
        self.capture = arguments.get("capture")
        self.rows = RingWriter(Path(self.capture["ring"])) if self.capture else None

    def add(self, request):
        if request["tokens"][0] == REFUSED:
            raise ValueError("this prompt\nis not taken")
        self.running[request["id"]] = dict(request, drawn=0)

    def abort(self, ids):
        for number in ids:
            self.running.pop(number, None)

    def step(self):
        self.steps += 1
        time.sleep(self.arguments.get("step_s", 0.0))
        if self._goes_wrong("dies_at", self.steps):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._goes_wrong("hangs_at", self.steps):
            time.sleep(60)
        if self._goes_wrong("fails_at", self.steps):
            raise RuntimeError("out of\nmemory")
        drawn = []
        for number, request in list(self.running.items()):
            place = request["drawn"]
            self._send_rows(request)
            new = token(request["seed"], place)
            request["drawn"] = place + 1
            stopped, full = new in request["stop_token_ids"], place + 1 == request["max_new_tokens"]
            if stopped or full:
                del self.running[number]
            drawn.append(Drawn(number, [new], [logprob(place)], "stop" if stopped else "length" if full else None))
        return drawn

    def update_weights(self, ring, version):
        """Counts and sums what comes, and keeps nothing."""
        if ring != self.ring:
            self.reader, self.ring = RingReader(Path(ring)), ring
        pieces, data, problem = {}, {}, None
        try:
            while True:
                if self._goes_wrong("damages_update", version):
                    self._flip_a_bit()
                try:
                    with self.reader.receive(20.0) as received:
                        assert received is not None, "the trainer sent nothing"
                        header = read_header(received.arrays)
                        if header.end is not None:
                            break
                        if header.number == 2 and self._goes_wrong("dies_in_update", version):
                            os.kill(os.getpid(), signal.SIGKILL)
                        if header.number == 2 and self._goes_wrong("hangs_in_update", version):
                            time.sleep(60)
                        for name, piece in header.pieces.items():
                            pieces[name] = piece
                            data.setdefault(name, []).append(np.array(received.arrays[name]))
                except CorruptSlot as error:
                    problem = error  # the rest is read all the same, so that the next update finds an empty ring
        except WireError as error:
            problem = error
        if problem:
            raise ValueError(f"weights of version {version} refused: {problem}")
        refused = [name for name in pieces if "bad" in name]
        if refused:
            raise ValueError(f"weights of version {version} refused: {refused[0]}")
        digest = Digest()
        for name, piece in pieces.items():
            digest.add(name, piece.dtype, piece.shape, np.concatenate(data[name]))
        return {"count": digest.count, "checksum": digest.checksum, "version": version}

    def compensate(self, channels):
        self.channels = channels

    def capabilities(self):
        told = {"residual_fraction": 0.5 if self.channels else 0.0, "backend": f"a script with channels {self.channels}"}
        return dict.fromkeys(("weights", "activations", "k", "v", "query"), "bf16") | told

    def facts(self):
        return {"engine": "script", "max_model_len": CONTEXT}

    def close(self):
        self.running.clear()

    def _send_rows(self, request):
        """Rows of the tokens that this step computes: the prompt, later the newest token."""
        if self.rows is None or self.capture is None:
            return
        size, drawn = len(request["tokens"]), request["drawn"]
        position = np.arange(size, dtype=np.uint32) if drawn == 0 else np.asarray([size + drawn - 1], np.uint32)
        count, layers, experts = position.size, self.capture["layers"], self.capture["experts"]
        record = {
            "sample": np.full(count, request["sample"], np.uint64),
            "attempt": np.full(count, request["attempt"], np.uint16),
            "position": position,
            "pass": np.zeros(count, np.uint16),
            "version": np.zeros(count, np.int32),
            "routes.ids": np.full((count, layers, experts), request["id"], np.uint8),
            "routes.layers": np.arange(layers, dtype=np.uint16),
            "routes.part": np.asarray([0, experts], np.uint32),
        }
        self.rows.send(record, 20.0)

    def _flip_a_bit(self):
        """In the record that comes next, once it has arrived."""
        number = int(self.reader._released[0])
        while not self.reader._has(number):
            time.sleep(0.001)
        self.reader._slot(number)[1][1000] ^= 4

    def _goes_wrong(self, what: str, now: int) -> bool:
        if self.arguments.get(what) != now:
            return False
        try:
            os.unlink(self.arguments["once"])
        except FileNotFoundError:
            return False
        return True


if __name__ == "__main__":
    sys.exit(loop.serve(int(sys.argv[-1]), lambda start: ScriptedGenerator(start["arguments"])))
