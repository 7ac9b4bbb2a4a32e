"""Pairs of sequences: readers of corpora, errors with file and line, batches."""
