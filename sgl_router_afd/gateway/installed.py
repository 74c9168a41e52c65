"""Is smg there, in a version that this router knows?"""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec

from sglang_afd.errors import ConfigError

OLDEST, FIRST_TOO_NEW = (1, 13), (2, 0)  # as pyproject.toml has it
HINT = "pip install 'smg>=1.13,<2'"  # the extra `smg` would bring SGLang's CUDA dependencies, too


def check_version() -> str:
    """The version.

    Raises:
        ConfigError: It is not installed, or another one is.
    """
    if find_spec("smg") is None:
        raise ConfigError(f"--data-plane smg needs smg, which is not installed; {HINT}")
    version = importlib.metadata.version("smg")
    if not OLDEST <= _major_minor(version) < FIRST_TOO_NEW:
        raise ConfigError(f"--data-plane smg got smg {version}, wanted 1.13 or a later 1.x; {HINT}")
    return version


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
