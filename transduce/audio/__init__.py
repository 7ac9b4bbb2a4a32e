"""Sound -> frames."""
