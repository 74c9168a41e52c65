from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from sglang_afd.config import AfdConfig, Role
from sglang_afd.errors import ConfigError
from sglang_afd.files import read_file
from sglang_afd.model_config import num_experts_of
from sglang_afd.upstream import cpu_shim
from sglang_afd.upstream.model_check import (
    TESTED_ARCHITECTURES,
    check_model,
    local_model_path,
)

CONFIG = AfdConfig(role=Role.MLP)
UNTESTED = AfdConfig(role=Role.MLP, allow_untested_model=True)


def write(directory: Path, **config: Any) -> str:
    base = {"architectures": [TESTED_ARCHITECTURES[0]], "num_experts": 8}
    (directory / "config.json").write_text(json.dumps(base | config))
    return str(directory)


def refusal(path: str, overrides: str = "{}", config: AfdConfig = CONFIG) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(path, overrides, config)
    return str(caught.value)


@pytest.mark.parametrize("architecture", TESTED_ARCHITECTURES)
def test_a_tested_architecture_is_accepted(tmp_path: Path, architecture: str) -> None:
    check_model(write(tmp_path, architectures=[architecture]), "{}", CONFIG)


@pytest.mark.parametrize(
    "key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]
)
def test_the_experts_are_counted_under_every_name(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, **{"num_experts": None, key: 60})

    assert num_experts_of(path, "{}") == 60


def test_the_experts_of_a_composite_model_are_those_of_its_text_half(tmp_path: Path) -> None:
    path = write(tmp_path, num_experts=None, text_config={"num_experts": 4})

    assert num_experts_of(path, "{}") == 4


def test_overrides_count(tmp_path: Path) -> None:
    assert num_experts_of(write(tmp_path), '{"num_experts": 3}') == 3


@pytest.mark.parametrize("experts", [{"num_experts": None}, {"num_experts": 1}, {"num_experts": 0}])
def test_a_dense_model_is_refused_with_what_to_use(tmp_path: Path, experts: dict[str, Any]) -> None:
    path = write(tmp_path, architectures=["Qwen3ForCausalLM"], **experts)

    message = refusal(path, config=UNTESTED)

    assert f"Qwen3ForCausalLM in {path} is not a mixture-of-experts model" in message
    assert "serve it with python -m sglang.launch_server" in message


@pytest.mark.parametrize("place", ["model", "text"])
def test_a_quantised_model_is_refused(tmp_path: Path, place: str) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    text = {"text_config": {"num_experts": 8, **quantised}}

    message = refusal(write(tmp_path, **(quantised if place == "model" else text)))

    assert "is quantised; quantised experts are not supported yet" in message
    assert "Use the unquantised checkpoint" in message


@pytest.mark.parametrize(("is_cpu", "is_refused"), [(True, True), (False, False)])
def test_fp8_in_blocks_is_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cpu: bool, is_refused: bool
) -> None:
    monkeypatch.setattr(cpu_shim, "IS_CPU", is_cpu)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = write(tmp_path, quantization_config=config)

    if is_refused:
        assert "is quantised" in refusal(path)
    else:
        check_model(path, "{}", CONFIG)


@pytest.mark.parametrize(
    ("architectures", "name"),
    [(["MixtralForCausalLM"], "MixtralForCausalLM"), ([], "unknown"), (None, "unknown")],
)
def test_an_untested_architecture_is_refused_unless_asked_for(
    tmp_path: Path, architectures: list[str] | None, name: str
) -> None:
    path = write(tmp_path, architectures=architectures)

    message = refusal(path)
    check_model(path, "{}", UNTESTED)

    assert f"{name} is not among the tested architectures ({TESTED_ARCHITECTURES[0]}" in message
    assert "add --afd-allow-untested-model" in message


@pytest.mark.parametrize(
    ("overrides", "message"), [("{", "is not JSON"), ("[1]", "must be a JSON object")]
)
def test_overrides_that_are_no_object_are_refused(
    tmp_path: Path, overrides: str, message: str
) -> None:
    assert f"--json-model-override-args {message}" in refusal(write(tmp_path), overrides)


def path_of(model_path: str | None) -> str:
    raw = argparse.Namespace(model_path=model_path, revision=None, download_dir=None)
    return local_model_path(raw)


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert path_of(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("missing", [None, ""])
def test_a_missing_model_path_is_refused(missing: str | None) -> None:
    with pytest.raises(ConfigError, match="--model-path is missing; give the directory"):
        path_of(missing)


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_a_path_that_is_no_directory_is_refused_without_asking_the_hub(path: str) -> None:
    with pytest.raises(ConfigError, match=f"--model-path {path} is not a directory"):
        path_of(path)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "not a name", "a/b/c"])
def test_a_name_that_the_hub_does_not_give_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ConfigError, match=f"--model-path {name} is no directory here and cannot"):
        path_of(name)


def test_the_config_of_a_model_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    reads: list[Path] = []

    def counted(file: Path) -> bytes:
        reads.append(file)
        return read_file(file)

    monkeypatch.setattr("sglang_afd.model_config.read_file", counted)

    check_model(path, "{}", CONFIG)

    assert reads == [tmp_path / "config.json"]
