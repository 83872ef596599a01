"""Gate one projection with the other (SwiGLU) and round to FP4, in one pass over memory."""
