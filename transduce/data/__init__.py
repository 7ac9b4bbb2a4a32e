"""Pairs of sequences: where they come from, what can be wrong with them, and how they batch."""
