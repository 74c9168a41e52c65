"""Reads a JSON file that a person named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError
from sglang_afd.files import read_file


def read_json(path: Path, wanted: str, flag: str = "") -> Any:
    """What the file holds.

    Args:
        path: Of the file.
        wanted: What it should be, for the message.
        flag: That named it, for the message.
    Raises: ConfigError, when it cannot be read, is no JSON, or is nested without end.
    """
    try:
        return json.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        named = f"{flag} {path}".strip()
        raise ConfigError(f"{named}: no readable {wanted} ({error})") from error
