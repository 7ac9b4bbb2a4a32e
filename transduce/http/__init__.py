"""What the HTTP servers share: own names, time limits, sound in requests."""
