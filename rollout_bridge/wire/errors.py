"""What goes wrong between two processes. Every message is one line that names the culprit and the remedy."""


class WireError(Exception):
    """The ring or a record cannot be used."""


class RingFull(WireError, TimeoutError):
    """The reader did not free a slot in time."""


class RingClosed(WireError):
    """The writer has ended and everything that it sent has been read."""


class CorruptSlot(WireError):
    """A slot does not hold what was written. It has been dropped; the next one can be received.

    Args:
      message: the line for the user.
      sequence: number of the lost record, from 0.
    """

    def __init__(self, message: str, sequence: int):
        super().__init__(message)
        self.sequence = sequence
