"""HTTP paths that every role has."""

from __future__ import annotations

HEALTH_PATH = "/health"
STATUS_PATH = "/afd/v1/status"  # attention servers, MLP servers and the router
REGISTRATION_PATH = "/afd/v1/registration"  # attention and MLP servers: what they tell a router
SERVERS_PATH = "/afd/v1/servers"  # of the router, where servers register
