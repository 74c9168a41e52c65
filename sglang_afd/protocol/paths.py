"""HTTP paths that every role has."""

from __future__ import annotations

STATUS_PATH = "/afd/v1/status"  # attention servers, MLP servers and the router
