"""The router's own HTTP API: registration, groups, drains, workers, decisions, health, OpenAPI."""
