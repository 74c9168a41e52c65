from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.fingerprint import fingerprint, safetensors_files
from sglang_afd.model_config import read_config

DATA_BYTES = 1_000_000
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "num_experts": 8,
    "rope_scaling": {"factor": 2.0, "_name_or_path": "/here"},
    "_name_or_path": "/home/somebody/model",
    "transformers_version": "5.12.0",
}


def write_shard(path: Path, *, num_bytes: int = DATA_BYTES, metadata: bool = True) -> None:
    header: dict[str, Any] = {
        "weight": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    }
    if metadata:
        header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    data = bytes(index * 7 % 251 for index in range(251)) * (num_bytes // 251 + 1)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[:num_bytes])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("model-00001.safetensors", "model-00002.safetensors"):
        write_shard(directory / name)
    return directory


def hash_of(model: Path, *, load_format: str = "auto", overrides: str = "{}") -> str:
    return fingerprint(str(model), load_format=load_format, overrides=overrides)


def rewrite_config(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset, 2 if offset < 0 else 0)
        file.write(data)


def truncate(path: Path, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - num_bytes)


def test_a_fingerprint_is_a_hex_sha256(model: Path) -> None:
    assert len(bytes.fromhex(hash_of(model))) == 32


def test_a_copy_under_another_path_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "somewhere" / "else")

    assert hash_of(copy) == hash_of(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_version": "4.0"},
        {"_name_or_path": "elsewhere"},
        {"_commit_hash": "abc"},
        {"rope_scaling": {"factor": 2.0, "_name_or_path": "/there"}},
    ],
)
def test_paths_and_versions_do_not_count(model: Path, changes: dict[str, Any]) -> None:
    before = hash_of(model)

    rewrite_config(model, **changes)

    assert hash_of(model) == before


def test_the_order_of_the_config_does_not_count(model: Path) -> None:
    before = hash_of(model)

    (model / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))

    assert hash_of(model) == before


def test_a_shards_metadata_does_not_count(model: Path) -> None:
    before = hash_of(model)

    write_shard(model / "model-00001.safetensors", metadata=False)

    assert hash_of(model) == before


def test_files_beside_the_model_do_not_count(model: Path) -> None:
    before = hash_of(model)

    (model / "README.md").write_text("hello")

    assert hash_of(model) == before


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda model: rewrite_config(model, num_experts=9),
    "nested config": lambda model: rewrite_config(model, rope_scaling={"factor": 4.0}),
    "quantisation": lambda model: (model / "hf_quant_config.json").write_text('{"a": 1}'),
    "first byte of the weights": lambda model: write_weight(model, 0),
    "last byte of the weights": lambda model: write_weight(model, DATA_BYTES - 1),
    "header": lambda model: write_shard(model / "model-00002.safetensors", num_bytes=500_000),
    "missing shard": lambda model: (model / "model-00002.safetensors").unlink(),
    "further shard": lambda model: write_shard(model / "model-00003.safetensors"),
}


def write_weight(model: Path, position: int) -> None:
    path = model / "model-00002.safetensors"
    overwrite(path, path.stat().st_size - DATA_BYTES + position, b"\xff")


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_changes_the_fingerprint(model: Path, change: str) -> None:
    before = hash_of(model)

    CHANGES[change](model)

    assert hash_of(model) != before


def test_overrides_count_by_their_content(model: Path) -> None:
    plain = hash_of(model)

    overridden = hash_of(model, overrides='{"num_hidden_layers": 2, "a": 1}')

    assert overridden != plain
    assert hash_of(model, overrides='{"a":1,"num_hidden_layers":2}') == overridden


def test_dummy_weights_need_no_shards_and_are_another_model(model: Path) -> None:
    loaded = hash_of(model)
    for shard in model.glob("*.safetensors"):
        shard.unlink()

    dummy = hash_of(model, load_format="dummy")

    assert dummy != loaded


@pytest.mark.parametrize("num_bytes", [1, 4096, DATA_BYTES])
def test_a_shard_that_lost_its_end_is_refused(model: Path, num_bytes: int) -> None:
    truncate(model / "model-00002.safetensors", num_bytes)

    with pytest.raises(ConfigError, match=r"model-00002\.safetensors is cut short"):
        hash_of(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"version https://git-lfs.github.com/spec/v1\n",
        (10_000).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_shard_without_its_whole_header_is_refused(model: Path, content: bytes) -> None:
    (model / "model-00001.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match=r"model-00001\.safetensors is cut short"):
        hash_of(model)


@pytest.mark.parametrize("header", [b"\xff\xfe", b"{", b"[]", b'{"a": 1}', b'{"a": {}}'])
def test_a_shard_whose_header_is_nonsense_is_refused(model: Path, header: bytes) -> None:
    shard = model / "model-00001.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)

    with pytest.raises(ConfigError, match=r"model-00001\.safetensors has no safetensors header"):
        hash_of(model)


def test_a_large_shard_is_sampled_and_not_read(model: Path) -> None:
    shard = model / "model-00002.safetensors"
    num_bytes = 1 << 40  # sparse: reading it all would take hours
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    ).encode()
    shard.write_bytes(len(header).to_bytes(8, "little") + header)
    with shard.open("r+b") as file:
        file.truncate(8 + len(header) + num_bytes)

    assert hash_of(model)


def test_a_directory_without_shards_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors in .*--load-format dummy"):
        safetensors_files(str(tmp_path))


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a directory with a config\.json"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read"), ("[]", "holds a list, expected a JSON object")]
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_config(str(tmp_path))
