"""What a model's config.json says, as far as servers and their launcher must know it alike."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.files import read_file

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_config(model_path: str) -> dict[str, object]:
    """The model's config.json.

    Raises:
        ConfigError: Not a directory with one, or not JSON.
    """
    path = Path(model_path) / "config.json"
    try:
        config = json.loads(read_file(path).decode())
    except FileNotFoundError:
        raise ConfigError(
            f"--model-path {model_path} is not a directory with a config.json; "
            f"download the model first and give its directory"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def configs_of(model_path: str, overrides: str) -> tuple[dict[str, object], dict[str, object]]:
    """The model's settings, and those of its text half, which may be the same.

    Args:
        model_path: Directory with config.json.
        overrides: SGLang's --json-model-override-args.

    Raises:
        ConfigError: Neither can be read.
    """
    model = read_config(model_path)
    model.update(_overrides(overrides))
    text = model.get("text_config")
    return model, text if isinstance(text, dict) else model


def num_experts_of(model_path: str, overrides: str) -> int:
    """Routed experts of a layer, 0 for a dense model."""
    _, text = configs_of(model_path, overrides)
    return _num_experts(text)


def require_experts(model_path: str, overrides: str) -> int:
    """Routed experts of a layer.

    Raises:
        ConfigError: It is no mixture of experts.
    """
    model, text = configs_of(model_path, overrides)
    return experts_in(model, text, model_path)


def experts_in(model: dict[str, object], text: dict[str, object], model_path: str) -> int:
    """Routed experts of a layer, from settings that `configs_of` has read from there.

    Raises:
        ConfigError: It is no mixture of experts.
    """
    num_experts = _num_experts(text)
    if num_experts < 2:
        raise ConfigError(
            f"{architecture_of(model)} in {model_path} is not a mixture-of-experts model (no "
            f"expert count in its config.json), so there is nothing to split; serve it with "
            f"python -m sglang.launch_server"
        )
    return num_experts


def architecture_of(model: dict[str, object]) -> str:
    """The model's class as SGLang looks it up, "unknown" without one."""
    architectures = model.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    return "unknown"


def _num_experts(text: dict[str, object]) -> int:
    counts = (text.get(key) for key in EXPERT_COUNT_KEYS)
    return max((count for count in counts if isinstance(count, int)), default=0)


def _overrides(overrides: str) -> dict[str, object]:
    try:
        parsed = json.loads(overrides)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--json-model-override-args is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError("--json-model-override-args must be a JSON object")
    return parsed
