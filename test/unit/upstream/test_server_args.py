from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from model_configs import SMALL_QWEN3

from sglang_afd import cli
from sglang_afd.config import AfdConfig, Role
from sglang_afd.errors import ConfigError
from sglang_afd.ports import FREE_PORTS
from sglang_afd.upstream import cpu_shim, server_args
from sglang_afd.upstream.server_args import RoleArgs, merge_config_file, parse_server_args

ATTN = AfdConfig(role=Role.ATTN, mlp_url="http://127.0.0.1:30010")
MLP = AfdConfig(role=Role.MLP)
on_cpu = pytest.mark.skipif(not cpu_shim.IS_CPU, reason="needs a machine without a CUDA driver")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with no more than a config."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SMALL_QWEN3))
    return str(directory)


def parse(model: str, *flags: str, config: AfdConfig = ATTN) -> RoleArgs:
    return parse_server_args(["--model-path", model, *flags], config)


@on_cpu
def test_a_machine_without_a_gpu_gets_what_sglang_needs_there(model: str) -> None:
    args = parse(model).server_args

    assert (args.device, args.attention_backend, args.sampling_backend) == (
        "cpu",
        "torch_native",
        "pytorch",
    )
    assert args.max_total_tokens == 16384


@on_cpu
def test_flags_of_the_user_win_over_the_defaults_of_a_cpu(model: str) -> None:
    args = parse(
        model,
        "--attention-backend",
        "flex_attention",
        "--max-total-tokens",
        "99",
        "--device",
        "cpu",
    ).server_args

    assert (args.attention_backend, args.max_total_tokens) == ("flex_attention", 99)


@on_cpu
def test_a_cache_sized_by_the_user_gets_no_second_size(model: str) -> None:
    by_fraction = parse(model, "--mem-fraction-static", "0.37").server_args
    by_tokens = parse(model, "--max-total-tokens", "99").server_args

    assert (by_fraction.mem_fraction_static, by_fraction.max_total_tokens) == (0.37, None)
    assert by_tokens.max_total_tokens == 99


def test_sglangs_own_flags_reach_it(model: str) -> None:
    args = parse(model, "--port", "12345", "--chunked-prefill-size", "64").server_args

    assert (args.port, args.chunked_prefill_size, args.model_path) == (12345, 64, model)


def test_the_number_of_mlp_ranks_is_ours_and_sglang_is_told_one(model: str) -> None:
    args = parse(model, "--ep-size", "4", config=MLP)

    assert (args.ep_size, args.server_args.ep_size) == (4, 1)


def test_the_process_group_of_an_attention_server_gets_a_port_that_no_connection_is_given(
    model: str,
) -> None:
    assert parse(model).server_args.nccl_port in FREE_PORTS
    assert parse(model, "--nccl-port", "40000").server_args.nccl_port == 40000


def test_shared_experts_stay_separate_on_the_attention_side(model: str) -> None:
    assert parse(model).server_args.disable_shared_experts_fusion is True


REFUSED = [
    (["--tp-size", "2"], "--tp-size 2", "start more servers instead"),
    (["--dp-size", "2"], "--dp-size 2", "start more servers instead"),
    (["--pp-size", "2"], "--pp-size 2", "start more servers instead"),
    (["--nnodes", "2"], "--nnodes 2", "start one server for each host instead"),
    (["--enable-dp-attention"], "--enable-dp-attention", "start more servers instead"),
    (["--enable-two-batch-overlap"], "SGLang's batch overlap", "this package's own task"),
    (["--enable-single-batch-overlap"], "SGLang's batch overlap", "this package's own task"),
    (["--moe-a2a-backend", "deepep"], "--moe-a2a-backend deepep", "the exchange takes its place"),
    (["--enable-eplb"], "--enable-eplb", "each expert has one place"),
    (["--ep-num-redundant-experts", "2"], "--ep-num-redundant-experts", "one place"),
    (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE", "leave it out"),
    (["--disaggregation-mode", "prefill"], "--disaggregation-mode prefill", "leave it out"),
    (["--enable-lora"], "LoRA", "merge the adapters"),
    (["--lora-paths", "a=b"], "LoRA", "merge the adapters"),
    (["--quantization", "fp8"], "--quantization fp8", "leave it out"),
    (["--load-format", "gguf"], "--load-format gguf", "use auto, safetensors or dummy"),
    (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num 2", "leave it out"),
    (["--enable-torch-compile"], "--enable-torch-compile", "not tested yet"),
]


@pytest.mark.parametrize("config", [ATTN, MLP], ids=["attn", "mlp"])
@pytest.mark.parametrize(
    ("flags", "what", "instead"), REFUSED, ids=[" ".join(flags) for flags, _, _ in REFUSED]
)
def test_what_is_not_supported_is_refused_with_what_to_do(
    model: str, config: AfdConfig, flags: list[str], what: str, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(model, *flags, config=config)

    assert what in str(caught.value)
    assert f"is not supported with --role {config.role}; " in str(caught.value)
    assert instead in str(caught.value)


@pytest.mark.parametrize("flag", ["--cuda-graph-backend-decode", "--cuda-graph-backend-prefill"])
def test_cuda_graphs_are_refused_on_the_attention_side_only(model: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} full is not supported with --role attn"):
        parse(model, flag, "full")

    assert parse(model, flag, "full", config=MLP)
    assert parse(model, flag, "disabled")


def test_expert_parallelism_belongs_to_the_mlp_servers(model: str) -> None:
    with pytest.raises(ConfigError, match="--ep-size 2 is not .* give it to the MLP servers"):
        parse(model, "--ep-size", "2")


@on_cpu
def test_a_device_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="--device cuda .* this machine has no CUDA driver"):
        parse(model, "--device", "cuda")


@pytest.mark.parametrize("watchdog", ["60", "79"])
def test_a_watchdog_that_bites_before_the_stall_deadline_is_refused(
    model: str, watchdog: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(model, "--watchdog-timeout", watchdog)

    assert f"--afd-stall-timeout 60 with --watchdog-timeout {watchdog}" in str(caught.value)
    assert "make the stall timeout at most 75% of the watchdog" in str(caught.value)


def test_a_watchdog_that_bites_later_is_accepted(model: str) -> None:
    assert parse(model, "--watchdog-timeout", "80").server_args.watchdog_timeout == 80


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--chunked-prefil-size", "did you mean --chunked-prefill-size?"),
        ("--prot=1", "did you mean --port?"),
        ("--zzzzzzzzzzzzzz", "see --help for those that exist"),
    ],
)
def test_a_flag_that_sglang_lacks_is_refused_with_the_closest(
    model: str, flag: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(model, flag)

    assert str(caught.value) == f"unknown flag {flag.split('=')[0]}; {hint}"


def test_a_value_that_sglang_cannot_parse_is_refused_instead_of_exiting(model: str) -> None:
    with pytest.raises(ConfigError, match="--port: invalid int value: 'x'; see --help"):
        parse(model, "--port", "x")


def test_a_combination_that_sglang_refuses_is_refused_by_us(model: str) -> None:
    with pytest.raises(ConfigError, match="SGLang refuses .*: --ssl-keyfile requires"):
        parse(model, "--ssl-keyfile", "key.pem")


def test_a_dense_model_is_refused_before_sglang_looks_at_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')

    with pytest.raises(ConfigError, match="is not a mixture-of-experts model"):
        parse(str(tmp_path))


def test_sglangs_help_is_shown_as_it_is() -> None:
    assert "--chunked-prefill-size" in server_args.format_help()


def write_yaml(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_config_file_sets_flags_of_both_sides(tmp_path: Path, model: str) -> None:
    file = write_yaml(
        tmp_path / "server.yaml",
        f"role: attn\nafd-mlp: http://h:1\nafd-max-rows: 7\nmodel-path: {model}\n"
        "port: 12345\ndisable-overlap-schedule: true\n",
    )

    config, rest = cli.parse(merge_config_file(["--config", file]))
    args = parse_server_args(rest, config).server_args

    assert config == AfdConfig(role=Role.ATTN, mlp_url="http://h:1", max_rows=7)
    assert (args.port, args.disable_overlap_schedule, args.model_path) == (12345, True, model)


def test_switches_of_ours_work_in_a_config_file(tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "a.yaml", "role: mlp\nafd-allow-untested-model: true\n")

    config, rest = cli.parse(merge_config_file(["--config", file]))

    assert config.allow_untested_model
    assert rest == []


def test_a_switch_that_is_off_in_a_config_file_stays_off(tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "a.yaml", "role: mlp\nafd-allow-untested-model: false\n")

    config, rest = cli.parse(merge_config_file(["--config", file]))

    assert not config.allow_untested_model
    assert rest == []


def test_flags_win_over_the_config_file(tmp_path: Path, model: str) -> None:
    file = write_yaml(tmp_path / "a.yml", f"model-path: {model}\nport: 1111\nafd-max-rows: 7\n")
    argv = ["--role", "mlp", "--config", file, "--port", "2222", "--afd-max-rows", "8"]

    config, rest = cli.parse(merge_config_file(argv))

    assert config.max_rows == 8
    assert parse_server_args(rest, config).server_args.port == 2222


def test_without_a_config_file_nothing_is_changed() -> None:
    assert merge_config_file(["--port", "1"]) == ["--port", "1"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{}", "must be YAML"),
        ("a.yaml", "[1, 2]", "must contain a dictionary"),
        ("a.yaml", "a: [", "--config: "),
    ],
)
def test_a_config_file_that_sglang_cannot_use_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = write_yaml(tmp_path / name, text)

    with pytest.raises(ConfigError, match=message):
        merge_config_file(["--config", file])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config"], "No config file specified"),
        (["--config", "/no/such.yaml"], "Config file not found"),
        (["--config", "a.yaml", "--config", "b.yaml"], "Multiple config files"),
    ],
)
def test_a_config_flag_without_one_file_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--config: {message}"):
        merge_config_file(argv)


def test_a_config_file_may_be_joined_to_its_flag(tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "a.yaml", "role: mlp\n")

    config, _ = cli.parse(merge_config_file(cli.split_config([f"--config={file}"])))

    assert config.role is Role.MLP


def test_a_log_level_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="--log-level loud is not a level"):
        parse(model, "--log-level", "loud")


@pytest.mark.parametrize("field", server_args._UNTESTED)
def test_what_switches_an_untested_feature_off_is_its_default(field: str) -> None:
    default = server_args.ServerArgs.__dataclass_fields__[field].default

    assert default in server_args._UNTESTED[field] or default is dataclasses.MISSING


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-pdmux"],
        ["--enable-hierarchical-cache"],
        ["--is-embedding"],
        ["--smg-grpc-mode"],
        ["--model-impl", "transformers"],
        ["--cpu-offload-gb", "2"],
    ],
)
def test_an_untested_feature_is_refused(model: str, argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{argv[0]} is not supported .* not tested"):
        parse(model, *argv)


@pytest.mark.parametrize(
    ("url", "transport", "is_cuda", "expected"),
    [
        ("http://127.0.0.1:30010", "auto", True, "cuda_ipc"),
        ("http://127.0.0.1:30010", "auto", False, "zmq"),
        ("http://10.0.0.5:30010", "auto", True, "zmq"),
        ("http://127.0.0.1:30010,http://10.0.0.5:30010", "auto", True, "zmq"),
        ("http://10.0.0.5:30010", "cuda_ipc", True, "cuda_ipc"),
        ("http://127.0.0.1:30010", "zmq", True, "zmq"),
    ],
)
def test_rows_stay_on_the_gpu_where_the_mlp_servers_are_found_on_this_host(
    url: str, transport: str, is_cuda: bool, expected: str
) -> None:
    config = AfdConfig(role=Role.ATTN, mlp_url=url, transport=transport)

    assert server_args.resolve_transport(config, is_cuda=is_cuda).transport == expected


def test_fp8_rows_need_both_roles_on_one_host() -> None:
    config = AfdConfig(role=Role.ATTN, mlp_url="http://10.0.0.5:1", dispatch_dtype="fp8")

    with pytest.raises(ConfigError, match="fp8 needs --afd-transport cuda_ipc"):
        server_args.resolve_transport(config, is_cuda=True)


def graphs_refused(model: str, *flags: str) -> list[str]:
    """What is refused of CUDA graphs when rows stay on the GPU; parsed on any machine."""
    parser = server_args._parser()
    raw = parser.parse_args(["--model-path", model, *flags])
    config = AfdConfig(role=Role.ATTN, mlp_url="http://127.0.0.1:1", transport="cuda_ipc")
    return [what for is_set, what, _ in server_args._refused_graphs(raw, config) if is_set]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ((), []),
        (("--attention-backend", "fa3"), []),
        (("--cuda-graph-backend-decode", "full"), []),
        (("--cuda-graph-max-bs-decode", "64"), []),
        (("--attention-backend", "flashmla"), ["--attention-backend flashmla"]),
        (("--attention-backend", "flashmla", "--cuda-graph-backend-decode", "disabled"), []),
        (("--attention-backend", "flashmla", "--disable-cuda-graph"), []),
        (("--cuda-graph-backend-decode", "breakable"), ["--cuda-graph-backend-decode breakable"]),
        (("--enable-breakable-cuda-graph",), ["--cuda-graph-backend-prefill breakable"]),
        (("--cuda-graph-config", '{"decode": {"max_bs": 8}}'), ["--cuda-graph-config"]),
    ],
)
def test_with_rows_on_the_gpu_decode_steps_are_whole_graphs_and_prefill_is_not(
    model: str, flags: tuple[str, ...], refused: list[str]
) -> None:
    assert graphs_refused(model, *flags) == refused


def test_sglang_is_told_which_graphs_to_capture() -> None:
    on_gpu, on_host = (
        AfdConfig(role=Role.ATTN, mlp_url="http://127.0.0.1:1", transport=transport)
        for transport in ("cuda_ipc", "zmq")
    )

    assert server_args._graph_flags(on_gpu) == ["--cuda-graph-backend-prefill", "disabled"]
    assert "--cuda-graph-backend-decode" in server_args._graph_flags(on_host)
