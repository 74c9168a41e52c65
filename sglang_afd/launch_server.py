"""`python -m sglang_afd.launch_server --role attn|mlp`: SGLang's flags, and ours."""

from __future__ import annotations

from sglang_afd.upstream import cpu_shim  # isort: skip - must precede every import of SGLang

import logging
import os
import sys
from collections.abc import Sequence

from sglang_afd import cli
from sglang_afd.config import Role
from sglang_afd.errors import AfdError, ConfigError
from sglang_afd.process import announce_as_parent, die_with_parent

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run one server until told to stop; returns the exit code (2 for a mistake in `argv`)."""
    announce_as_parent()
    try:
        return _main(argv)
    except ConfigError as error:
        print(f"sglang-afd: error: {error}", file=sys.stderr)
        return 2
    except AfdError as error:
        print(f"sglang-afd: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _main(argv: Sequence[str]) -> int:
    if cli.wants_help(argv):
        return _print_help()
    argv = cli.split_config(argv)
    if "--config" not in argv:
        cli.parse(argv)  # our own mistakes are told at once, before SGLang is imported
    _prepare_environment()

    from sglang_afd.upstream import server_args as upstream_args
    from sglang_afd.upstream.versions import check_version

    check_version()
    config, rest = cli.parse(upstream_args.merge_config_file(argv))
    args = upstream_args.parse_server_args(rest, config)
    if config.role is Role.MLP:
        from sglang_afd.mlp import ranks

        return ranks.serve(config, args.server_args, ep_size=args.ep_size, argv=argv)
    from sglang_afd.attn import server

    return server.serve(config, args.server_args)


def _prepare_environment() -> None:
    # A generating health check would fail while the MLP servers are away, and an orchestrator
    # would then end the very server that is to survive.
    os.environ.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")
    if cpu_shim.IS_CPU:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The roles take turns on the same cores: with several threads, those that wait may spin for
        # about 0.1 ms, not for the milliseconds of libgomp's default.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _print_help() -> int:
    cli.build_parser().print_help()
    try:
        from sglang_afd.upstream.server_args import format_help
    except ImportError as error:
        print(f"\nSGLang's flags cannot be shown: {error}")
        return 0
    print("\nSGLang's own flags\n==================\n")
    print(format_help())
    return 0


if __name__ == "__mp_main__":  # a spawned child, which will import SGLang for seconds from here on
    die_with_parent()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
