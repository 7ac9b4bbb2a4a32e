"""A trained network: its file, its inputs, its transcripts."""
