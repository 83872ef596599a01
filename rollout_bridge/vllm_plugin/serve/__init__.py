"""A vLLM that serves one trainer: `python -m rollout_bridge.vllm_plugin.serve --fd N`, N being one end of a socket pair.

Messages are JSON objects with a `type`, each behind its length (`channel.py`). In order:

    worker                                        trainer
    hello: protocol, code, python          ->
                                           <-     start: engine arguments, settings, capture
    ready: what vLLM says of the model     ->
    failed: message, at any time; it ends  ->
                                           <-     submit: requests      close
                                           <-     abort: ids, pause, resume, update_weights, compensate, capabilities, health, each
                                                  with a number `call`
    reply: `call`, and the answer or `error`  ->
    finished, aborted, refused             ->                     each request once, unless the trainer gave it up
    alive                                  ->                     about once a second while it generates

A worker begins paused, because it has no weights. It reads its messages in order, between two steps of the engine, generates in between,
and ends when the other end of the socket is closed, however that came about. Rows of a step are in the capture's ring before the next
message is read, so after the reply to `abort` none of the aborted requests follow. Not guaranteed: anything about a request after the
worker died; the trainer submits what is unfinished to the next worker.
"""

PROTOCOL = 3
"""Version of the messages; both sides compare it."""
