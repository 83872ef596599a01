"""What goes wrong with workers. Every message is one line that names the culprit and the remedy."""


class WorkerDied(ConnectionError):
    """The worker has ended, and all it sent before has been received. The message says how it ended."""


class EngineDied(RuntimeError):
    """There is no worker, and there will be none."""
