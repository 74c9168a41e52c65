"""The relay processes: HTTP in, the same bytes to a server, the answer's bytes back."""
