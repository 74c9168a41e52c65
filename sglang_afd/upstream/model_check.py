"""Is this a model that can be split? Decided from its config.json, before anything loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_afd.config import AfdConfig
from sglang_afd.errors import ConfigError
from sglang_afd.model_config import architecture_of, configs_of, experts_in
from sglang_afd.upstream import cpu_shim

# Architectures that the test-suite compares with stock SGLang, token by token.
TESTED_ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM")


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
    model, text = configs_of(model_path, overrides)
    experts_in(model, text, model_path)
    name = architecture_of(model)
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


def _is_block_fp8(quantised: object) -> bool:
    return (
        isinstance(quantised, dict)
        and quantised.get("quant_method") == "fp8"
        and bool(quantised.get("weight_block_size"))
    )
