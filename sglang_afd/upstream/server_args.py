"""SGLang's command line: parsed by SGLang, with a CPU's defaults and refusals for what we lack."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml  # type: ignore[import-untyped]
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from sglang_afd.cli import StrictParser, build_parser, unknown_flag
from sglang_afd.config import (
    FP8,
    MAX_STEP_SHARE,
    AfdConfig,
    Role,
    Transport,
    choose_transport,
)
from sglang_afd.errors import ConfigError
from sglang_afd.fingerprint import fingerprint
from sglang_afd.ports import free_ports
from sglang_afd.protocol import auth
from sglang_afd.protocol.paths import REGISTRATION_PATH, STATUS_PATH
from sglang_afd.upstream import cpu_shim
from sglang_afd.upstream.model_check import check_model, local_model_path

logger = logging.getLogger(__name__)

# Flags with queues, pools or servers of their own, which losing an MLP server would leave behind;
# each with the values that switch it off.
_NOT_TESTED = "leave it out: it is not tested with split roles yet"
_UNTESTED: dict[str, tuple[object, ...]] = {
    "attn_cp_size": (1,),
    "cpu_offload_gb": (0,),
    "custom_weight_loader": (None, []),
    "dllm_algorithm": (None,),
    "elastic_ep_backend": (None,),
    "enable_flexkv": (False,),
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_lmcache": (False,),
    "enable_pdmux": (False,),
    "enable_return_routed_experts": (False,),
    "enable_streaming_session": (False,),
    "enable_symm_mem": (False,),
    "enable_unified_memory": (False,),
    "encoder_only": (False,),
    "expert_distribution_recorder_mode": (None,),
    "grpc_mode": (False,),
    "init_expert_location": ("trivial",),
    "is_embedding": (False,),
    "kt_weight_path": (None,),
    "model_impl": ("auto", "sglang"),
    "smg_grpc_mode": (False,),
    "use_ray": (False,),
    "weight_cache_mode": ("off",),
}

# What stock SGLang needs on a machine without a GPU; the user's own flags come later and win.
_CPU_DEFAULTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
}
# A KV cache that fits a laptop beside the other servers, unless the user sizes it. The fraction
# only bounds it from above, and generously: SGLang takes what other processes load at the same time
# for this server's weights.
_CPU_KV_DEFAULTS = {"--mem-fraction-static": "0.8", "--max-total-tokens": "16384"}

# With rows that stay on the GPU, where steps are CUDA graphs: those whose graphs are tested.
GRAPH_ATTENTION = ("fa3", "triton", "flashinfer")
_DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True)
class RoleArgs:
    """A command line as one of our roles understands it."""

    server_args: ServerArgs
    ep_size: int  # number of MLP ranks; SGLang itself is told 1


def format_help() -> str:
    """SGLang's own help, as it is."""
    return _parser().format_help()


def merge_config_file(argv: Sequence[str]) -> list[str]:
    """Replace `--config FILE` by what the file says, as SGLang does; flags win over the file.

    Raises:
        ConfigError: SGLang cannot use the file.
    """
    arguments = list(argv)
    if "--config" not in arguments:
        return arguments
    parser = _parser()
    for action in build_parser()._actions:  # the merger must know which of ours are switches
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(action.option_strings[-1], action="store_true")
    try:
        merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    except (ValueError, TypeError, AttributeError, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: {error}") from None
    return merged


def parse_server_args(argv: Sequence[str], config: AfdConfig) -> RoleArgs:
    """SGLang's arguments, resolved by SGLang, for one of our roles.

    Args:
        argv: What was left of the command line after ours, without `--config`.
        config: Decides what is refused and which fields are fixed.

    Raises:
        ConfigError: A flag that SGLang lacks, or a combination that this version does not support.
    """
    parser = _parser()
    raw, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise unknown_flag(parser, unknown[0])
    if config.role is Role.ATTN:
        is_cuda = not cpu_shim.IS_CPU and raw.device in (None, "cuda")
        config = resolve_transport(config, is_cuda=is_cuda)
    refuse_unsupported(raw, config)
    if raw.log_level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level {raw.log_level} is not a level; use e.g. info or warning")
    raw.model_path = local_model_path(raw)
    check_model(raw.model_path, raw.json_model_override_args, config)
    arguments = [*_cpu_defaults(raw), *argv, "--model-path", raw.model_path, "--ep-size", "1"]
    if config.role is Role.ATTN and not cpu_shim.IS_CPU:
        arguments += _graph_flags(config)
    try:
        server_args = prepare_server_args(arguments)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"SGLang refuses these arguments: {error}") from error
    if config.role is Role.ATTN:
        _fix_attention_fields(server_args)
    return RoleArgs(server_args=server_args, ep_size=raw.ep_size)


def resolve_transport(config: AfdConfig, *, is_cuda: bool) -> AfdConfig:
    """The attention role's settings with `--afd-transport` decided.

    Its slots must exist before the MLP servers are asked where they exchange rows. So servers that
    are found on this host's loopback are expected at an `ipc://` address, their default; the
    handshake refuses those that are not.

    Raises:
        ConfigError: What was asked for cannot work.
    """
    # Without --afd-mlp they are taken to be where the router is.
    places = config.mlp_urls or config.router_urls
    is_here = all(auth.is_loopback(url) for url in places)
    is_asked = config.transport == Transport.CUDA_IPC
    address = "ipc://" if is_here or is_asked else places[0]
    transport = choose_transport(config.transport, is_cuda=is_cuda, address=address)
    if config.dispatch_dtype == FP8 and transport is not Transport.CUDA_IPC:
        raise ConfigError(
            "--afd-dispatch-dtype fp8 needs --afd-transport cuda_ipc, with both roles on the GPUs "
            "of one host"
        )
    return replace(config, transport=transport.value)


def _graph_flags(config: AfdConfig) -> list[str]:
    """What is said to SGLang of CUDA graphs, after the user's own flags."""
    prefill = ["--cuda-graph-backend-prefill", _DISABLED]
    if config.transport == Transport.CUDA_IPC:
        return prefill
    logger.warning("CUDA graphs are off: rows go through host memory")
    return [*prefill, "--cuda-graph-backend-decode", _DISABLED]


def model_fingerprint(server_args: ServerArgs) -> str:
    """What both roles compare in the handshake; errors as in `fingerprint`."""
    return fingerprint(
        server_args.model_path,
        load_format=server_args.load_format,
        overrides=server_args.json_model_override_args,
    )


def _parser() -> StrictParser:
    parser = StrictParser(prog="python -m sglang_afd.launch_server", add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _cpu_defaults(raw: argparse.Namespace) -> list[str]:
    if not cpu_shim.IS_CPU:
        return []
    defaults = dict(_CPU_DEFAULTS)
    if raw.mem_fraction_static is None and raw.max_total_tokens is None:
        defaults |= _CPU_KV_DEFAULTS
    return [item for pair in defaults.items() for item in pair]


def refuse_unsupported(raw: argparse.Namespace, config: AfdConfig) -> None:
    """Refuse before anything loads; every line says what to do instead."""
    role = config.role
    more_servers = "start more servers instead: any number of both roles works"
    leave_out = "leave it out: "
    refusals: list[tuple[bool, str, str]] = [
        (raw.tp_size > 1, f"--tp-size {raw.tp_size}", more_servers),
        (raw.dp_size > 1, f"--dp-size {raw.dp_size}", more_servers),
        (raw.pp_size > 1, f"--pp-size {raw.pp_size}", more_servers),
        (raw.nnodes > 1, f"--nnodes {raw.nnodes}", "start one server for each host instead"),
        (raw.enable_dp_attention, "--enable-dp-attention", more_servers),
        (
            role is Role.ATTN and raw.ep_size > 1,
            f"--ep-size {raw.ep_size}",
            "give it to the MLP servers, which own the experts",
        ),
        (
            raw.enable_two_batch_overlap or raw.enable_single_batch_overlap,
            "SGLang's batch overlap",
            leave_out + "overlapping the two roles is this package's own task",
        ),
        (
            raw.moe_a2a_backend not in (None, "none"),
            f"--moe-a2a-backend {raw.moe_a2a_backend}",
            leave_out + "the exchange takes its place",
        ),
        (
            raw.enable_eplb or raw.ep_num_redundant_experts > 0,
            "--enable-eplb or --ep-num-redundant-experts",
            leave_out + "each expert has one place in this version",
        ),
        (
            raw.speculative_algorithm is not None,
            f"--speculative-algorithm {raw.speculative_algorithm}",
            leave_out + "speculative decoding is not supported yet",
        ),
        (
            raw.disaggregation_mode != "null",
            f"--disaggregation-mode {raw.disaggregation_mode}",
            leave_out + "prefill/decode disaggregation is not supported yet",
        ),
        (
            bool(raw.enable_lora or raw.lora_paths),
            "LoRA",
            "merge the adapters into the checkpoint: they are not supported yet",
        ),
        (
            raw.quantization is not None,
            f"--quantization {raw.quantization}",
            leave_out + "quantised experts are not supported yet",
        ),
        (
            raw.load_format not in ("auto", "safetensors", "dummy"),
            f"--load-format {raw.load_format}",
            "use auto, safetensors or dummy: other formats cannot be split by tensor",
        ),
        (
            raw.tokenizer_worker_num > 1,
            f"--tokenizer-worker-num {raw.tokenizer_worker_num}",
            leave_out + "one HTTP process answers /afd/v1/status",
        ),
        *_refused_graphs(raw, config),
        (
            role is Role.MLP and bool(raw.api_key or raw.admin_api_key),
            "--api-key",
            "its HTTP side has no keys; keep --host on loopback or behind a firewall",
        ),
        (raw.enable_torch_compile, "--enable-torch-compile", leave_out + "it is not tested yet"),
        (
            cpu_shim.IS_CPU and raw.device not in (None, "cpu"),
            f"--device {raw.device}",
            "this machine has no CUDA driver; use --device cpu or leave it out",
        ),
        (
            role is Role.ATTN
            and 0 < raw.watchdog_timeout * MAX_STEP_SHARE < config.stall_timeout_s,
            f"--afd-stall-timeout {config.stall_timeout_s:g} with "
            f"--watchdog-timeout {raw.watchdog_timeout:g}",
            f"make the stall timeout at most {MAX_STEP_SHARE:.0%} of the watchdog's, or SGLang "
            f"ends the server while it waits",
        ),
    ]
    refusals += [
        (getattr(raw, field) not in allowed, "--" + field.replace("_", "-"), _NOT_TESTED)
        for field, allowed in _UNTESTED.items()
    ]
    for is_set, what, instead in refusals:
        if is_set:
            raise ConfigError(f"{what} is not supported with --role {role}; {instead}")


def _refused_graphs(raw: argparse.Namespace, config: AfdConfig) -> list[tuple[bool, str, str]]:
    if config.role is not Role.ATTN:
        return []
    decode, prefill = raw.cuda_graph_backend_decode, raw.cuda_graph_backend_prefill
    is_off = decode == _DISABLED or raw.disable_cuda_graph or raw.disable_decode_cuda_graph
    has_graphs = config.transport == Transport.CUDA_IPC and not is_off
    attention = (raw.attention_backend, raw.decode_attention_backend, raw.prefill_attention_backend)
    return [
        (
            config.transport == Transport.ZMQ and decode not in (None, _DISABLED),
            f"--cuda-graph-backend-decode {decode}",
            "leave it out: rows go through host memory; see --afd-transport",
        ),
        (
            decode not in (None, _DISABLED, "full"),
            f"--cuda-graph-backend-decode {decode}",
            "leave it out: a decode step is one whole graph",
        ),
        (
            prefill not in (None, _DISABLED),
            f"--cuda-graph-backend-prefill {prefill}",
            "leave it out: prefill exchanges rows in pieces, outside CUDA graphs",
        ),
        (
            bool(raw.cuda_graph_config),
            "--cuda-graph-config",
            "use --cuda-graph-max-bs-decode, --cuda-graph-bs-decode or "
            "--cuda-graph-backend-decode disabled instead",
        ),
        (
            has_graphs and any(name not in (None, *GRAPH_ATTENTION) for name in attention),
            f"--attention-backend {' '.join(name for name in attention if name)}",
            f"use one of {', '.join(GRAPH_ATTENTION)}, or --cuda-graph-backend-decode disabled",
        ),
    ]


def _fix_attention_fields(server_args: ServerArgs) -> None:
    # Shared experts stay separate modules, and top-k must come out in its standard format.
    server_args.override("sglang_afd", disable_shared_experts_fusion=True)
    # A router asks for the status twice a second.
    quiet = [*server_args.uvicorn_access_log_exclude_prefixes, STATUS_PATH, REGISTRATION_PATH]
    server_args.override("sglang_afd", uvicorn_access_log_exclude_prefixes=quiet)
    if server_args.nccl_port is None:
        # SGLang would take one that a connection can be given before the scheduler listens on it.
        server_args.override("sglang_afd", nccl_port=free_ports(1, "0.0.0.0")[0])
    if server_args.device != "cpu":
        server_args.override("sglang_afd", moe_runner_backend="triton")
