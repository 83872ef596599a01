"""Round to FP4, and what that leaves over in chosen channels once more, in one pass over memory."""
