"""Trained networks: their files, inputs, transcripts and evaluation."""
