"""Known text in sound: when each of its words and phones is said, and whether it fits."""
