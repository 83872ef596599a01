"""`python -m rollout_bridge.vllm_plugin.serve --fd N`: started by the trainer, of no use by hand."""

import argparse
import os
import sys

from rollout_bridge.vllm_plugin.serve.build import build
from rollout_bridge.vllm_plugin.serve.loop import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A vLLM engine that serves the trainer at the other end of a socket.")
    parser.add_argument("--fd", type=int, required=True, help="inherited descriptor of the socket")
    code = serve(parser.parse_args().fd, build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to save, and threads of vLLM would take seconds to end
