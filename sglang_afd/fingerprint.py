"""Are two directories the same model? A hash that reads headers and samples, not gigabytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.model_config import read_config

SAMPLE_BYTES = 4096
NUM_SAMPLES = 16  # of each shard, evenly spaced from its first data byte to its last
_IGNORED_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def fingerprint(model_path: str, *, load_format: str, overrides: str) -> str:
    """SHA-256 over what makes two servers' weights and shapes the same.

    Args:
        model_path: Directory with config.json and, unless dummy, safetensors shards.
        load_format: SGLang's --load-format; "dummy" hashes the format instead of the shards.
        overrides: SGLang's --json-model-override-args.

    Raises:
        ConfigError: No config.json, no safetensors file, or one that is broken.
    """
    digest = hashlib.sha256()
    directory = Path(model_path)
    config = read_config(model_path)
    digest.update(json.dumps(_normalised(config), sort_keys=True).encode())
    digest.update(json.dumps(json.loads(overrides), sort_keys=True).encode())
    quantisation = directory / "hf_quant_config.json"
    if quantisation.is_file():
        digest.update(quantisation.read_bytes())
    if load_format == "dummy":
        digest.update(b"dummy weights")
        return digest.hexdigest()
    for shard in safetensors_files(model_path):
        _add_shard(digest, shard)
    return digest.hexdigest()


def safetensors_files(model_path: str) -> list[Path]:
    """The shards of a checkpoint, sorted by name.

    Raises:
        ConfigError: There are none.
    """
    shards = sorted(Path(model_path).glob("*.safetensors"))
    if not shards:
        raise ConfigError(
            f"no *.safetensors in {model_path}; other formats cannot be split by tensor. "
            f"Convert the checkpoint, or use --load-format dummy"
        )
    return shards


def _normalised(value: object) -> object:
    if isinstance(value, dict):
        return {key: _normalised(item) for key, item in value.items() if key not in _IGNORED_KEYS}
    if isinstance(value, list):
        return [_normalised(item) for item in value]
    return value


def _add_shard(digest: hashlib._Hash, shard: Path) -> None:
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        data_start = 8 + length
        file.seek(0, 2)
        data_bytes = file.tell() - data_start
        if data_bytes < 0:
            raise ConfigError(f"{shard} is cut short: its header alone needs {data_start} bytes")
        file.seek(8)
        header, wanted_bytes = _read_header(file.read(length), shard)
        if data_bytes < wanted_bytes:
            raise ConfigError(
                f"{shard} is cut short: it has {data_bytes} bytes of tensors, its header tells of "
                f"{wanted_bytes}; copy or download it again"
            )
        digest.update(json.dumps(header, sort_keys=True).encode())
        last = max(0, data_bytes - SAMPLE_BYTES)
        for index in range(NUM_SAMPLES):
            file.seek(data_start + last * index // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def _read_header(text: bytes, shard: Path) -> tuple[dict[str, object], int]:
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
        return header, max(ends, default=0)
    except (ValueError, AttributeError, TypeError, LookupError):
        raise ConfigError(f"{shard} has no safetensors header; copy or download it again") from None
