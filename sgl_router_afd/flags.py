"""The router's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sgl_router_afd.config import DATA_PLANES, DEFAULTS, LOG_LEVELS, RouterConfig
from sgl_router_afd.control.policy import POLICIES
from sgl_router_afd.endpoints import OWN, RELAYED
from sgl_router_afd.keys import Key, key_of
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.auth import load_secret


def parse_args(argv: Sequence[str] | None = None) -> RouterConfig:
    """Read the command line; a mistake prints one error and exits with code 2.

    Args:
        argv: The arguments without the program's name; None takes those of the process.
    """
    parser = _build_parser()
    args = vars(parser.parse_args(argv))
    try:
        return RouterConfig(
            attn_urls=tuple(args.pop("attn")),
            mlp_urls=tuple(args.pop("mlp")),
            afd_secret=Key(load_secret(args.pop("afd_secret_file"))),
            api_key=key_of("--api-key", args.pop("api_key"), args.pop("api_key_file")),
            admin_api_key=key_of(
                "--admin-api-key", args.pop("admin_api_key"), args.pop("admin_api_key_file")
            ),
            **args,
        )
    except ConfigError as error:
        parser.error(str(error))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_router_afd.launch_router",
        allow_abbrev=False,
        description="Pair sglang-afd attention and MLP servers, and relay OpenAI and SGLang "
        "requests to the attention servers that are ready. Servers register themselves "
        "(--afd-router), or are named here; they may be started before or after the router.",
        epilog=f"Own endpoints: {' '.join(OWN)}. Relayed byte for byte: {' '.join(RELAYED)}. "
        "SIGTERM or SIGINT ends the router in order, a second one at once.",
    )
    _add_servers(parser)
    _add_keys(parser)

    def flag(field: str, text: str, metavar: str) -> None:
        default = DEFAULTS[field]
        parser.add_argument(
            flag_of(field),
            dest=field,
            type=type(default),
            default=default,
            metavar=metavar,
            help=f"{text} (default: %(default)s)",
        )

    flag(
        "policy",
        "which ready server gets a request: the least full, the one that had the same beginning "
        "before, each in turn, or the less full of two that are drawn",
        "{" + ",".join(POLICIES) + "}",
    )
    flag(
        "data_plane",
        "what relays requests: the router's own processes, or the smg gateway, which "
        "`pip install 'smg>=1.13,<2'` brings",
        "{" + ",".join(DATA_PLANES) + "}",
    )
    flag("smg_args", "more flags for smg, in quotation marks", '"FLAGS"')
    flag(
        "control_port",
        "with smg the port of the router's own endpoints, which servers register at and the status "
        "page is on; 0 takes the one after --port",
        "PORT",
    )
    flag(
        "ratio",
        "attention to MLP servers of a group, e.g. 7:1: where a new attention server is needed "
        "most; without it groups are kept even",
        "A:M",
    )
    flag(
        "state_file",
        "keeps what a restarted router cannot learn from its servers: epochs of groups, so that "
        "they never go back, the group of each server, and drains that were asked for",
        "FILE",
    )
    flag(
        "lease_s",
        "seconds that a server may be silent before it gets no new requests; after as many more "
        "it leaves its group",
        "S",
    )
    flag("host", "address to listen on; 0.0.0.0 for every interface", "HOST")
    flag("port", "port to listen on; 0 takes a free one and logs it", "PORT")
    flag(
        "status_interval_s", "seconds between two polls of a server that --attn or --mlp names", "S"
    )
    flag("status_timeout_s", "seconds one poll may take", "S")
    flag("connect_timeout_s", "seconds to open a connection before the next server is tried", "S")
    flag("shutdown_timeout_s", "seconds that running requests get to finish after SIGTERM", "S")
    flag(
        "relay_processes",
        "processes that relay and share the port; 0 takes one for each core, up to 4",
        "N",
    )
    flag(
        "relay_timeout_s",
        "seconds that a relay process, or smg, may be silent before it counts as hung, is killed, "
        "and another one takes its place",
        "S",
    )
    flag(
        "hold_timeout_s",
        "seconds that a request waits while its group pairs, or pairs again; then 503",
        "S",
    )
    flag(
        "retry_budget",
        "requests that may be sent again to another server, for each request that comes, when "
        "theirs breaks off before it answered; 0 sends none again",
        "SHARE",
    )
    flag("max_concurrent_requests", "requests let in at once; more of them wait", "N")
    flag("queue_size", "requests that wait to be let in; more of them get 429", "N")
    flag("queue_timeout_s", "seconds that one waits to be let in; then 503", "S")
    flag("header_timeout_s", "seconds a request's header may take; then 408", "S")
    flag("body_timeout_s", "seconds between two pieces of a request's body; then 408", "S")
    flag("keep_alive_timeout_s", "seconds that a connection stays open without a request", "S")
    flag("max_headers", "fields of a request's header; more of them get 431", "N")
    flag("max_header_bytes", "largest header of a request; a larger one gets 431", "BYTES")
    flag(
        "max_replay_body_bytes",
        "largest request body that is read whole before it is sent on, and kept to be sent again; "
        "a larger one is passed on as it comes",
        "BYTES",
    )
    flag("max_body_bytes", "largest request body; a larger one is answered with 413", "BYTES")
    flag("log_level", "what is logged to stderr", "{" + ",".join(LOG_LEVELS) + "}")
    return parser


FLAGS = {"hold_timeout_s": "--hold-timeout"}  # those that are not named as their field


def flag_of(field: str) -> str:
    """The flag that sets a field of `RouterConfig`."""
    return FLAGS.get(field, f"--{field.replace('_', '-')}")


def _add_servers(parser: argparse.ArgumentParser) -> None:
    for flag, role in (("--attn", "attention"), ("--mlp", "MLP")):
        parser.add_argument(
            flag,
            metavar="URL",
            nargs="+",
            action="extend",
            default=[],
            help=f"{role} servers that do not register themselves, http://host:port each; may be "
            "given several times",
        )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--afd-secret-file",
        metavar="FILE",
        default="",
        help="holds the secret that servers sign their registrations with, mode 0600",
    )
    for flag, who in (
        ("--api-key", "clients must send as `Authorization: Bearer KEY`"),
        ("--admin-api-key", "changes, and reading /afd/v1/, need in the same way"),
    ):
        parser.add_argument(
            flag,
            metavar="KEY",
            help=f"what {who}; other users of this host see it in the process list",
        )
        parser.add_argument(
            f"{flag}-file", metavar="FILE", help=f"holds the key of {flag}, mode 0600"
        )
