"""A server's dealings with the router: what it says of itself, and what it is told."""
