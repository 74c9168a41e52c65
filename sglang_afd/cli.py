"""Our half of the command line; what is not ours is handed to SGLang untouched."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from sglang_afd.config import AfdConfig, Role
from sglang_afd.errors import ConfigError


class StrictParser(argparse.ArgumentParser):
    """Raises instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake on the command line.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}; see --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `--role` and of every `--afd-` flag, with defaults from `AfdConfig`."""
    parser = StrictParser(
        prog="python -m sglang_afd.launch_server",
        description="Serve the attention half or the expert half of a mixture-of-experts model. "
        "Every flag that does not begin with --afd- is SGLang's own and means the same here.",
        allow_abbrev=False,
        add_help=False,
        usage="%(prog)s --role attn|mlp --model-path PATH [--afd-... ] [SGLang's flags]",
    )
    _add_flags_of_both(parser.add_argument_group("Both roles"))
    _add_attn_flags(parser.add_argument_group("Attention role (--role attn)"))
    mlp = parser.add_argument_group("MLP role (--role mlp; --ep-size M is the number of ranks)")
    _add_mlp_flags(mlp)
    _add_device_flags(mlp)
    return parser


def _add_flags_of_both(both: argparse._ArgumentGroup) -> None:
    both.add_argument(
        "--role",
        help="attn: an SGLang server whose routed experts run elsewhere. "
        "mlp: a server that runs the routed experts, and nothing else. Required.",
    )
    both.add_argument("-h", "--help", action="store_true", help="Show this help and SGLang's.")
    _add(
        both,
        "secret_file",
        "--afd-secret-file",
        "FILE",
        "File (mode 0600) with the secret that peers prove to each other. Without it only ipc:// "
        "and loopback addresses are accepted.",
    )
    _add_router_flags(both)
    _add(
        both,
        "max_rows",
        "--afd-max-rows",
        "N",
        "Rows (tokens) of one exchange; larger batches go in pieces. Both roles must agree.",
    )
    _add(
        both,
        "transport",
        "--afd-transport",
        "auto|zmq|cuda_ipc",
        "How rows travel. cuda_ipc: GPUs of one host read and write each other's memory, inside "
        "CUDA graphs. zmq: through host memory. auto: cuda_ipc on a CUDA device with an ipc:// "
        "exchange address, else zmq; an attention server expects one where all of --afd-mlp is on "
        "the loopback. Both roles must agree. Default: auto.",
    )
    _add(
        both,
        "dispatch_dtype",
        "--afd-dispatch-dtype",
        "auto|fp8",
        "What rows are on their way to the experts. fp8: quantised, with a scale for every 128 "
        "values. auto: the model's dtype. Both roles must agree. Default: auto.",
    )
    _add(
        both,
        "wait_policy",
        "--afd-wait-policy",
        "auto|poll|memop",
        "With cuda_ipc, how a GPU waits for rows. poll: a kernel of one warp, for a GPU of its own "
        "or under MPS. memop: stream memory operations, for roles that share a GPU without MPS. "
        "auto: memop when this host has one GPU and no MPS, else poll. Default: auto.",
    )
    _add(
        both,
        "heartbeat_timeout_s",
        "--afd-heartbeat-timeout",
        "S",
        "Seconds of silence after which a peer counts as gone. Answered by a thread of its own, "
        "so a long expert run is not silence.",
    )
    both.add_argument(
        "--afd-allow-untested-model",
        dest="allow_untested_model",
        action="store_true",
        help="Serve an architecture that the test-suite does not cover; compare its answers with "
        "stock SGLang before you trust them.",
    )
    _add(
        both,
        "trace_file",
        "--afd-trace",
        "FILE",
        "Write a timeline of this server to FILE; python -m sglang_afd.merge_traces joins those of "
        "several servers into one for Perfetto.",
    )


def _add_router_flags(both: argparse._ArgumentGroup) -> None:
    _add(
        both,
        "router_url",
        "--afd-router",
        "URL[,URL...]",
        "HTTP addresses of routers that this server registers with; the first that answers is "
        "told. With it --afd-mlp and --afd-leader may be left out: the router says where rank 0 "
        "is. It keeps running when no router can be reached.",
    )
    _add(
        both,
        "advertise_url",
        "--afd-advertise-url",
        "URL",
        "HTTP address at which the router and other servers reach this one. Default: --host and "
        "--port; a server that listens everywhere takes the address from which it reaches the "
        "router.",
    )
    _add(
        both,
        "server_id",
        "--afd-server-id",
        "ID",
        "Name of this server at the router, the same over restarts: 1 to 64 letters, digits and "
        "._:-. Rank R of several in one command is ID-R. Default: role, host and port.",
    )
    _add(
        both,
        "drain_timeout_s",
        "--afd-drain-timeout",
        "S",
        "With --afd-router, how many seconds this server goes on after SIGTERM while the router "
        "sends nothing more: an attention server until its requests are done, an MLP server until "
        "no attention server of its group has any.",
    )


def _add_attn_flags(attn: argparse._ArgumentGroup) -> None:
    _add(
        attn,
        "mlp_url",
        "--afd-mlp",
        "URL[,URL...]",
        "HTTP address of MLP rank 0, which knows the other ranks; and those of spares that may "
        "take its place. Asked in order. Required, unless --afd-router is given.",
    )
    _add(
        attn,
        "stall_timeout_s",
        "--afd-stall-timeout",
        "S",
        "Seconds that a step waits for lost MLP servers before its requests are retracted; they "
        "then wait as long again before they are failed.",
    )
    _add(
        attn,
        "attach_timeout_s",
        "--afd-attach-timeout",
        "S",
        "Longest wait in seconds for the MLP servers at start-up.",
    )
    _add(
        attn,
        "num_micro_batches",
        "--afd-num-micro-batches",
        "auto|1..4",
        "Slices of each step, so that the experts of one run while another's attention does. auto "
        "decides for each step from measured times. Default: auto.",
    )
    _add(
        attn,
        "max_mlp_ranks",
        "--afd-max-mlp-ranks",
        "M",
        "With cuda_ipc, the MLP ranks for whose replies this server keeps memory, "
        "--afd-max-rows rows for each of them and each micro-batch.",
    )


def _add_mlp_flags(mlp: argparse._ArgumentGroup) -> None:
    _add(
        mlp,
        "ep_rank",
        "--afd-ep-rank",
        "R",
        "Expert-parallel rank of this server, 0 to M - 1. Without it all M ranks start on this "
        "host, on the ports P to P + M - 1 of --port P.",
    )
    _add(
        mlp,
        "leader_url",
        "--afd-leader",
        "URL[,URL...]",
        "HTTP address of rank 0, and those of spares that may take its place; required for spares, "
        "and without --afd-router for the other ranks, which report to it. Give rank 0 the same "
        "list, so that it waits as a spare when it comes back and another leads.",
    )
    _add(
        mlp,
        "listen",
        "--afd-listen",
        "ADDR",
        "Exchange address, ipc:///path or tcp://host:port (port 0 picks one). Default: ipc:// in "
        "a new directory of mode 0700.",
    )
    mlp.add_argument(
        "--afd-spare",
        dest="is_spare",
        action="store_true",
        help="Wait, without experts, until a rank of the group of --afd-leader is missing; then "
        "load its experts and take its place. It takes rank 0 only if its own address is one of "
        "--afd-leader.",
    )
    _add(mlp, "max_peers", "--afd-max-peers", "N", "Attention servers attached at once.")


def _add_device_flags(mlp: argparse._ArgumentGroup) -> None:
    _add(
        mlp,
        "mlp_cuda_graph_bs",
        "--afd-mlp-cuda-graph-bs",
        "N,N,...",
        "With cuda_ipc, the numbers of rows for which each MoE layer gets a CUDA graph; a unit "
        "takes the smallest that holds it. Default: 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, "
        "320, 384, 512, 640, 768, 1024.",
    )
    _add(
        mlp,
        "mlp_cuda_graph_max_bs",
        "--afd-mlp-cuda-graph-max-bs",
        "N",
        "With cuda_ipc, the largest of these; larger units are launched kernel by kernel.",
    )
    mlp.add_argument(
        "--afd-disable-mlp-cuda-graph",
        dest="is_mlp_cuda_graph_disabled",
        action="store_true",
        help="With cuda_ipc, launch every unit kernel by kernel.",
    )
    _add(
        mlp,
        "deep_gemm_sms",
        "--afd-deep-gemm-sms",
        "N",
        "Multiprocessors that DeepGEMM's persistent kernels use; fewer than there are leaves room "
        "for the kernels of the other role, which wait on the same GPU. 0 uses all.",
    )


def parse(argv: Sequence[str]) -> tuple[AfdConfig, list[str]]:
    """Split a command line into our settings and SGLang's arguments.

    Raises:
        ConfigError: A missing or wrong --role, an unknown --afd- flag, a value out of range.
    """
    parser = build_parser()
    namespace, rest = parser.parse_known_args(list(argv))
    _refuse_unknown_flags(parser, rest)
    values = vars(namespace)
    values.pop("help")
    values["role"] = _role(values["role"])
    return AfdConfig(**values), rest


def split_config(argv: Sequence[str]) -> list[str]:
    """Write `--config=FILE` as two arguments, the only form that SGLang's merger sees."""
    split: list[str] = []
    for argument in argv:
        flag, _, file = argument.partition("=")
        split += [flag, file] if flag == "--config" and file else [argument]
    return split


def wants_help(argv: Sequence[str]) -> bool:
    """Is this a call for help?"""
    return "--help" in argv or "-h" in argv


def _add(
    group: argparse._ArgumentGroup, field: str, flag: str, metavar: str, description: str
) -> None:
    default = AfdConfig.__dataclass_fields__[field].default
    shown = "" if isinstance(default, str) or default == -1 else f" Default: {default:g}."
    group.add_argument(
        flag,
        dest=field,
        metavar=metavar,
        type=type(default),
        default=default,
        help=description + shown,
    )


def _role(value: str | None) -> Role:
    if value in tuple(Role):
        return Role(value)
    got = "--role is missing" if value is None else f"--role {value} is not a role"
    raise ConfigError(
        f"{got}; use --role attn for attention or --role mlp for the experts. "
        f"To serve a model unsplit, use `python -m sglang.launch_server`"
    )


def _refuse_unknown_flags(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    unknown = [argument for argument in rest if argument.startswith("--afd-")]
    if unknown:
        raise unknown_flag(parser, unknown[0])


def unknown_flag(parser: argparse.ArgumentParser, argument: str) -> ConfigError:
    """The error for a flag that `parser` does not know, with the closest that it does."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    flag = argument.split("=", 1)[0]
    close = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "see --help for those that exist"
    return ConfigError(f"unknown flag {flag}; {hint}")
