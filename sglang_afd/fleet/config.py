"""What `python -m sglang_afd.launch` was asked to do."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sglang_afd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One router, its attention servers and its MLP servers, all on this host.

    Raises: ConfigError, naming the flag, what it got and what it takes.
    """

    attn: int = 2  # attention servers; 1 .. 64
    mlp: int = 1  # MLP servers, each one expert-parallel rank; 1 .. 64
    spares: int = 0  # MLP servers that wait to take the place of one that ends; 0 .. 64
    gpus: tuple[int, ...] = ()  # indices among the visible GPUs, each once; empty is all
    sm_share: tuple[tuple[str, int], ...] = ()  # role and percent of SMs, 1 .. 100; all without
    no_mps: bool = False  # servers that share a GPU take turns
    model_path: Path | None = None  # checkpoint directory; None is the embedded model
    host: str = "127.0.0.1"  # the router's address; the servers stay on 127.0.0.1
    port: int = 30000  # the router's port; 1 .. 65535
    prompt: str = ""  # ask this, print the answer and stop; empty serves until a signal
    demo: bool = False  # ask a built-in prompt first, then serve
    max_tokens: int = 64  # tokens of an answer to prompt or demo; 1 and up
    quiet: bool = False  # leave out what the servers print
    attn_args: tuple[str, ...] = ()  # more flags for every attention server
    mlp_args: tuple[str, ...] = ()  # more flags for every MLP server
    router_args: tuple[str, ...] = ()  # more flags for the router
    server_args: tuple[str, ...] = ()  # more flags for every attention and every MLP server

    def __post_init__(self) -> None:
        _check_range("--attn", self.attn, 1, 64)
        _check_range("--mlp", self.mlp, 1, 64)
        _check_range("--spares", self.spares, 0, 64)
        _check_range("--port", self.port, 1, 65535)
        for role, percent in self.sm_share:
            _check_range(f"--sm-share {role}", percent, 1, 100)
        if len(set(self.gpus)) < len(self.gpus):
            raise ConfigError(f"--gpus {','.join(map(str, self.gpus))} names a GPU twice")
        _check_range("--max-tokens", self.max_tokens, 1, 1 << 20)
        if self.prompt and self.demo:
            raise ConfigError("--prompt and --demo both say what to ask; give one of them")
        if self.model_path is not None and not os.path.isdir(self.model_path):
            raise ConfigError(
                f"--model-path {self.model_path} is no directory; "
                "give one with a config.json and safetensors files"
            )


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(LaunchConfig)}


def parse_args(argv: Sequence[str]) -> LaunchConfig:
    """Read the command line; a mistake prints one error and exits with code 2.

    Args:
        argv: The arguments without the program's name; those after `--` go to every attention and
            MLP server.
    """
    separator = list(argv).index("--") if "--" in argv else len(argv)
    parser = _build_parser()
    args, unknown = parser.parse_known_args(argv[:separator])
    if unknown:
        parser.error(f"unknown argument {unknown[0]}; SGLang's flags go after --, see --help")
    if not args.prompt.strip() and any(word.split("=")[0] == "--prompt" for word in argv):
        parser.error("--prompt is empty; say what to ask, or leave it out to serve")
    try:
        return LaunchConfig(**vars(args), server_args=tuple(argv[separator + 1 :]))
    except ConfigError as error:
        parser.error(str(error))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_afd.launch",
        allow_abbrev=False,
        description="Serve a mixture-of-experts model on this host: a router in front of attention "
        "servers that share MLP servers. Arguments after -- go to every attention and MLP server, "
        "for example: -- --dtype float32",
    )

    def flag(name: str, text: str, **options: Any) -> None:
        default = DEFAULTS[name]
        shown = "" if default in (None, "", ()) else " (default: %(default)s)"
        options.setdefault("type", type(default))
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=default, help=text + shown, **options
        )

    def switch(name: str, text: str) -> None:
        parser.add_argument(f"--{name}", action="store_true", help=text)

    flag("attn", "number of attention servers", metavar="N")
    flag("mlp", "number of MLP servers", metavar="M")
    flag("spares", "MLP servers that wait to take the place of one that ends", metavar="K")
    flag(
        "gpus",
        "use these of the visible GPUs, counted from 0 (default: all); "
        "servers share where they are fewer",
        type=_indices,
        metavar="I,J,...",
    )
    flag(
        "sm_share",
        "percent of a shared GPU's multiprocessors that a server of a role may use under MPS, "
        "for example attn=50,mlp=100 (default: all)",
        type=_shares,
        metavar="ROLE=P,...",
    )
    switch("no-mps", "start no MPS daemon when servers share a GPU; they take turns then")
    flag("model_path", "checkpoint directory (default: the embedded model)", type=Path)
    flag("host", "address of the router")
    flag("port", "port of the router")
    flag("prompt", "ask this, print the answer, and stop", metavar="TEXT")
    switch("demo", "ask a built-in prompt, then keep serving")
    flag("max_tokens", "longest answer to --prompt or --demo, in tokens", metavar="K")
    switch("quiet", "do not show what the servers print")
    for role in ("attn", "mlp", "router"):
        flag(
            f"{role}_args",
            f"more flags for role {role}, as one string; write --{role}-args=... "
            "when it starts with a dash",
            type=_words,
            metavar="FLAGS",
        )
    return parser


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not what a shell takes: {error}") from None


def _indices(text: str) -> tuple[int, ...]:
    try:
        indices = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list like 0,1,3") from None
    if min(indices) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} names a GPU below 0")
    return indices


def _shares(text: str) -> tuple[tuple[str, int], ...]:
    shares: dict[str, int] = {}
    for pair in text.split(","):
        role, _, percent = pair.strip().partition("=")
        if role not in ("attn", "mlp") or role in shares or not percent.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is nothing like attn=50,mlp=100")
        shares[role] = int(percent)
    return tuple(shares.items())


def _check_range(flag: str, got: int, low: int, high: int) -> None:
    if not low <= got <= high:
        raise ConfigError(f"{flag} got {got}; choose a number from {low} to {high}")
