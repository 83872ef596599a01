"""Blocks that more than one model family uses: norms, rotary positions, attention, routing, experts."""
