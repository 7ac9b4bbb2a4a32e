"""From sound to frames."""
