"""What the router's processes log, and how."""

from __future__ import annotations

import logging


def start_log(level: str) -> None:
    """Log to standard error from now on."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
