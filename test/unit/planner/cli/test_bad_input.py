"""Bad input gives one clear line and exit code 2."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_afd.planner.__main__ import main
from sglang_afd.planner.known_models import CONFIGS

MODEL = "--model Qwen3-30B-A3B --gpu H200 --source roofline"
INPUTS = f"{MODEL} --context 4096"
SPLIT = f"predict {INPUTS} --attn-gpus 4"

CASES = {
    "": "",
    "guess": "unknown command 'guess'; wanted one of predict, search",
    "search": "no --model; give the path of its config.json",
    "search --model Qwen3-30B-A3B": "no --gpu; give one of GB200",
    f"search {MODEL}": "give one of --context TOKENS and --lengths FILE",
    f"search {INPUTS} --contxt 3": "unrecognized arguments: --contxt 3; see --help",
    f"search {INPUTS} --context four": "argument --context: invalid float value: 'four'",
    "search --model Foo --gpu H200 --context 1": "model 'Foo' is not in the planner's list",
    "search --model ./no.json --gpu H200 --context 1": "no readable config.json",
    "search --model Qwen3-30B-A3B --gpu X9 --context 1": "GPU 'X9' is not in the planner's list",
    "search --model Qwen3-30B-A3B --gpu x9.json --context 1": "--gpu x9.json: no readable JSON",
    f"search {MODEL} --context nan": "--context: the number of tokens is nan",
    f"search {MODEL} --context 0": "--context: the number of tokens is 0",
    f"search {MODEL} --context -4096": "--context: the number of tokens is -4096",
    f"search {INPUTS} --context-std -1": "context_std_tokens is -1.0; it has to be a number of 0",
    f"search {INPUTS} --max-tpot 50000": "is it another unit? Wanted: milliseconds",
    f"search {INPUTS} --max-tpot 0.05": "is it another unit? Wanted: milliseconds",
    f"search {INPUTS} --max-tpot -5": "--max-tpot: the limit is -5",
    f"search {INPUTS} --verify-tokens 0": "verify_tokens is 0; it has to be a number above 0",
    f"search {INPUTS} --accepted-tokens 2": "2 tokens accepted of 1 verified in a step",
    f"search {INPUTS} --kv-dtype int3": "--kv-dtype int3: wanted one of fp8, bf16",
    f"search {INPUTS} --memory-fraction 90": "--memory-fraction 90: wanted above 0 and at most 1",
    f"search {INPUTS} --memory-fraction 0": "--memory-fraction 0: wanted above 0 and at most 1",
    f"search {INPUTS} --source magic": "--source magic: wanted one of auto, profile",
    f"search {INPUTS} --source profile": "--source profile: no --profile FILE",
    f"search {INPUTS} --profile x": "--source roofline and --profile x: leave one of the two out",
    f"search {INPUTS} --lengths x": "give one of --context TOKENS and --lengths FILE",
    f"search {MODEL} --lengths /no/such": "--lengths /no/such: cannot be read",
    f"search {INPUTS} --max-gpus 0": "max_gpus is 0; it has to be a number above 0",
    f"search {INPUTS} --max-gpus -8": "max_gpus is -8; it has to be a number above 0",
    f"search {INPUTS} --expert-parallel 3": "128 experts of Qwen3-30B-A3B do not divide among 3",
    f"search {INPUTS} --expert-parallel 0": "expert parallelism or micro-batches is 0",
    f"search {INPUTS} --expert-parallel two": "--expert-parallel two: wanted whole numbers",
    f"search {INPUTS} --micro-batches 0": "expert parallelism or micro-batches is 0",
    f"search {INPUTS} --micro-batches 5": "--micro-batches 5: wanted 1 to 4",
    f"search {INPUTS} --kernels fast": "--kernels fast: wanted one of fused, grouped",
    f"search {INPUTS} --max-tpot 1": "keeps 1 ms a token; the fastest takes",
    f"search {INPUTS} --commands /no/such/file": "--commands /no/such/file: cannot be written",
    "search --model Qwen3-235B-A22B --gpu H100 --context 4096 --max-gpus 1": "does not fit on up",
    f"search {MODEL} --context 4000000": "shorten the context",
    f"search {INPUTS} --max-gpus {10**26}": "max_gpus is 1e+26, outside 1 to 1e+06",
    f"search --gpu H200 --context 1 --model ~nobody-here/{'x' * 5000}": "no readable config.json",
    f"search --gpu H200 --context 1 --model {'x' * 5000}": "is not in the planner's list",
    "search --gpu H200 --context 1 --model /dev/zero": "more than 256 MiB",
    f"what-if {INPUTS} --prices H200=1e308": "H200 is 1e+308, outside 1e-06 to 1e+06",
    f"what-if {INPUTS} --speculation \u00b2:2": "wanted N:X, as in 4:2.5",
    f"predict {INPUTS}": "no --attn-gpus; give the number of attention GPUs",
    f"predict {INPUTS} --attn-gpus 0 --mlp-gpus 4": "attn_gpus is 0; it has to be a number above 0",
    f"predict {INPUTS} --attn-gpus four": "argument --attn-gpus: invalid int value: 'four'",
    f"{SPLIT} --mlp-gpus 0": "mlp_gpus is 0; it has to be a number above 0",
    f"{SPLIT} --mlp-gpus -1": "mlp_gpus is -1; it has to be a number above 0",
    f"{SPLIT} --mlp-gpus 3": "128 experts of Qwen3-30B-A3B do not divide among 3 GPUs",
    f"{SPLIT} --mlp-gpus 4 --expert-parallel 8": "4 MLP GPUs do not split into copies",
    f"{SPLIT} --mlp-gpus 4 --expert-parallel 0": "expert_parallel is 0",
    f"{SPLIT} --mlp-gpus 4 --micro-batches 0": "micro_batches is 0",
    f"{SPLIT} --mlp-gpus 4 --micro-batches 9": "--micro-batches 9: wanted 1 to 4",
    f"{SPLIT} --mlp-gpus 4 --batch 0": "batch_per_attn_gpu is 0",
    f"{SPLIT} --mlp-gpus 4 --batch 1": "2 micro-batches of 1 requests",
    f"{SPLIT} --mlp-gpus 4 --batch 5000": "lower the batch to 313",
    f"{SPLIT} --mlp-gpus 4 --mode half": "--mode half: wanted one of colocated, afd, core_only",
    f"{SPLIT} --mlp-gpus 4 --mode colocated": "a colocated deployment has no MLP GPUs",
    f"{SPLIT} --mlp-gpus 4 --baseline-batch 0": "batch_per_attn_gpu is 0",
    f"{SPLIT} --mlp-gpus 4 --baseline-expert-parallel 3": "do not divide among 3 GPUs",
    f"{SPLIT} --mlp-gpus 4 --max-tpot 1": "no batch keeps 1 ms a token",
    f"{SPLIT} --mlp-gpus 4 --batch 2 --max-tpot 1": "no batch keeps 1 ms a token",
    f"{SPLIT} --mlp-gpus 4 --batch 300 --max-tpot 20": "the limit is 20; lower the batch to 133",
    f"{SPLIT} --mlp-gpus 4 --max-tpot 20 --baseline-batch 200": "lower the batch to 80",
    "predict --model Qwen3-235B-A22B --gpu H100 --context 4096 --attn-gpus 4 --mlp-gpus 1": (
        "raise the expert parallelism"
    ),
    f"explain {INPUTS} --html /no/such/file": "--html /no/such/file: cannot be written",
    f"what-if {INPUTS} --prices H200": "--prices H200: wanted NAME=PRICE",
    f"what-if {INPUTS} --prices H200=0": "--prices: H200 is 0.0; it has to be a number above 0",
    f"what-if {INPUTS} --prices H20=1": "--prices: has no price of H200",
    f"what-if {INPUTS} --attn-gpu H20": "--attn-gpu and --mlp-gpu: give both, or none",
    f"what-if {INPUTS} --gpus X9": "GPU 'X9' is not in the planner's list",
    f"what-if {INPUTS} --contexts 1,two": "--contexts: 'two' is not a number",
    f"what-if {INPUTS} --contexts -1": "context_tokens is -1.0",
    f"what-if {INPUTS} --speculation 4": "--speculation 4: wanted N:X, as in 4:2.5",
    f"what-if {INPUTS} --speculation 2:3": "3 tokens accepted of 2 verified in a step",
}


@pytest.mark.parametrize("command", CASES)
def test_bad_input_gives_one_clear_line_and_exit_code_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(command.split())

    shown = capsys.readouterr()
    assert code == 2
    if command:
        assert CASES[command] in shown.err
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1
        assert shown.out == ""


def _gpu(**changes: object) -> dict[str, object]:
    fields = {
        "name": "X9",
        "memory_bytes": 1.5e11,
        "hbm_bytes_per_us": 5e6,
        "link_bytes_per_us": 4.5e5,
        "network_bytes_per_us": 5e4,
        "bf16_flops_per_us": 1e9,
        "fp8_flops_per_us": 2e9,
        "fp4_flops_per_us": 2e9,
        "gpus_per_node": 8,
        "link_domain_gpus": 8,
        "source": "a test",
    }
    return {**fields, **changes}


FILES = {
    "bandwidth in TB/s": (_gpu(hbm_bytes_per_us=5), "hbm_bytes_per_us is 5, outside"),
    "memory in GB": (_gpu(memory_bytes=150), "is it another unit? 80 GB is 8e10"),
    "flops per s": (_gpu(bf16_flops_per_us=1e15), "1 PFLOP/s is 1e9 flops per us"),
    "no GPU in a node": (_gpu(gpus_per_node=0), "gpus_per_node is 0"),
    "text for a number": (_gpu(memory_bytes="150 GB"), "is '150 GB', wanted a number"),
    "missing": ({"name": "X9"}, "has no memory_bytes and no hbm_bytes_per_us"),
    "unknown": (_gpu(speed=1), "unknown field 'speed'"),
    "a list": ([], "is [], wanted an object"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_gpu_file_is_checked_field_by_field(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, expected = FILES[case]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(fields), encoding="utf-8")

    code = main(["search", "--model", "Qwen3-30B-A3B", "--gpu", str(path), "--context", "4096"])

    assert code == 2
    assert expected in capsys.readouterr().err


def test_a_good_gpu_file_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(_gpu()), encoding="utf-8")

    code = main(["search", "--model", "Qwen3-30B-A3B", "--gpu", str(path), "--context", "4096"])

    assert code == 0
    assert "Qwen3-30B-A3B on X9" in capsys.readouterr().out


CONFIG = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}


@pytest.mark.parametrize("missing", ["num_experts", "hidden_size", "num_hidden_layers"])
def test_a_config_without_a_field_names_it(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {name: value for name, value in CONFIG.items() if name != missing}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    code = main(["search", "--model", str(tmp_path), "--gpu", "H200", "--context", "4096"])

    assert code == 2
    assert f"has no {missing}" in capsys.readouterr().err


def test_an_unknown_model_is_read_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    common = ["--gpu", "H200", "--context", "4096", "--source", "roofline"]

    assert main(["search", "--model", str(tmp_path), *common]) == 0
    unknown = capsys.readouterr().out.splitlines()
    assert main(["search", "--model", "Qwen3-30B-A3B", *common]) == 0
    known = capsys.readouterr().out.splitlines()

    assert unknown[3:8] == known[3:8]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("800;200\n", "line 1: is '800;200', wanted PROMPT,DECODE"),
        ("800,200\n\n800\n", "line 3: is '800', wanted PROMPT,DECODE"),
        ("", "at least one request"),
        ("800,0\n", "a request that decoded none"),
    ],
)
def test_a_file_of_lengths_is_checked_line_by_line(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8")

    code = main(["search", *MODEL.split(), "--lengths", str(path)])

    assert code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "no readable JSON"),
        ('{"schema_version": 99}', "profile schema 99, this planner reads 1"),
        ('{"schema_version": 1}', "has no shape and no gpu"),
        ('{"records": []}', "no record has a context and a measured step"),
        ("[]", "profile schema None"),
    ],
)
def test_a_profile_that_cannot_be_read_says_why(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")

    code = main(["search", "--profile", str(path), "--context", "4096"])

    assert code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--model", "--gpu", "--profile"])
def test_a_file_nested_without_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    others = {"--model": ["--gpu", "H200"], "--gpu": ["--model", "Qwen3-30B-A3B"], "--profile": []}

    code = main(["search", flag, str(path), "--context", "4096", *others[flag]])

    assert code == 2
    assert "no readable" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["nan,3", "1e999,5", "5,inf"])
def test_what_is_no_length_of_a_request_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"800,200\n{line}\n")

    code = main([*f"search {MODEL} --lengths".split(), str(path)])

    assert code == 2
    assert "what is no length" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--model", "--gpu", "--profile", "--lengths"])
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    flags = {"--model": "Qwen3-30B-A3B", "--gpu": "H200", "--context": "4096"} | {flag: str(path)}
    if flag == "--lengths":
        del flags["--context"]

    code = main(["search", *(word for pair in flags.items() for word in pair)])

    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_config_that_comes_through_a_pipe_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, json.dumps(CONFIGS["Qwen3-30B-A3B"]).encode())
    os.close(write_end)
    model = ["--model", f"/dev/fd/{read_end}", "--gpu", "H200", "--source", "roofline"]

    code = main(["search", *model, "--context", "4096"])

    os.close(read_end)
    assert code == 0
    assert "of context" in capsys.readouterr().out


def test_a_model_of_more_layers_than_any_is_refused_before_they_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Qwen3-30B-A3B"] | {"num_hidden_layers": 10**30}))

    code = main(["search", "--model", str(path), "--gpu", "H200", "--context", "4096"])

    assert code == 2
    assert "num_hidden_layers is 1e+30" in capsys.readouterr().err


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_afd.planner.cli.search_command.read_inputs", interrupted)

    assert main(f"search {INPUTS}".split()) == 130
