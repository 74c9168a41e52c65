"""Is this a model that can be split? Decided from its config.json, before anything loads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sglang_afd.config import AfdConfig
from sglang_afd.errors import ConfigError
from sglang_afd.fingerprint import read_config
from sglang_afd.upstream import cpu_shim

# Architectures that the test-suite compares with stock SGLang, token by token.
TESTED_ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM")
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def local_model_path(raw: argparse.Namespace) -> str:
    """The directory of `--model-path`, fetched from the hub as SGLang would when it is a name.

    Raises:
        ConfigError: Missing, not a directory, and not to be had from the hub.
    """
    if not raw.model_path:
        raise ConfigError("--model-path is missing; give the directory of the model")
    if Path(raw.model_path).is_dir():
        return str(raw.model_path)
    if raw.model_path.startswith(("/", ".", "~")):
        raise ConfigError(f"--model-path {raw.model_path} is not a directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(
            raw.model_path,
            revision=raw.revision,
            cache_dir=raw.download_dir,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"--model-path {raw.model_path} is no directory here and cannot be fetched: {error}"
        ) from None


def check_model(model_path: str, overrides: str, config: AfdConfig) -> None:
    """Refuse what cannot be split.

    Raises:
        ConfigError: Not a mixture of experts, quantised, or an architecture without a test.
    """
    model, text = _configs(model_path, overrides)
    architectures = model.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else "unknown"
    if num_experts_of(model_path, overrides) < 2:
        raise ConfigError(
            f"{name} in {model_path} is not a mixture-of-experts model (no expert count in its "
            f"config.json), so there is nothing to split; serve it with "
            f"python -m sglang.launch_server"
        )
    quantised = model.get("quantization_config") or text.get("quantization_config")
    if quantised and (cpu_shim.IS_CPU or not _is_block_fp8(quantised)):
        raise ConfigError(
            f"{model_path} is quantised; quantised experts are not supported yet, except FP8 with "
            f"weight_block_size on a GPU. Use the unquantised checkpoint"
        )
    if name not in TESTED_ARCHITECTURES and not config.allow_untested_model:
        raise ConfigError(
            f"{name} is not among the tested architectures ({', '.join(TESTED_ARCHITECTURES)}); "
            f"add --afd-allow-untested-model to try it"
        )


def num_experts_of(model_path: str, overrides: str) -> int:
    """Routed experts of a layer, 0 for a dense model."""
    _, text = _configs(model_path, overrides)
    counts = (text.get(key) for key in _EXPERT_COUNT_KEYS)
    return max((count for count in counts if isinstance(count, int)), default=0)


def _is_block_fp8(quantised: object) -> bool:
    return (
        isinstance(quantised, dict)
        and quantised.get("quant_method") == "fp8"
        and bool(quantised.get("weight_block_size"))
    )


def _configs(model_path: str, overrides: str) -> tuple[dict[str, object], dict[str, object]]:
    model = read_config(model_path)
    model.update(_overrides(overrides))
    text = model.get("text_config")
    return model, text if isinstance(text, dict) else model


def _overrides(overrides: str) -> dict[str, object]:
    try:
        parsed = json.loads(overrides)
    except ValueError as error:
        raise ConfigError(f"--json-model-override-args is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError("--json-model-override-args must be a JSON object")
    return parsed
