"""The clock of an update's stages."""

import time

import numpy as np


def seconds() -> np.ndarray:
    """Float64[2]: time, and processor time of this process, which also means something where other programs keep it from running."""
    return np.array([time.perf_counter(), time.process_time()])
