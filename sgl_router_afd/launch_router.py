"""python -m sgl_router_afd.launch_router: one HTTP endpoint in front of N attention servers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from aiohttp import web

from sgl_router_afd.app import build_app
from sgl_router_afd.config import RouterConfig, parse_args
from sgl_router_afd.policy import POLICIES
from sgl_router_afd.pool import ServerPool
from sgl_router_afd.relay import Relay
from sgl_router_afd.upstream_session import open_session
from sgl_router_afd.watch import watching
from sglang_afd.errors import ConfigError

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

logger = logging.getLogger(__name__)

# Drained connections only have their last bytes to flush.
CLEANUP_TIMEOUT_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns: The exit code: 0 after a signal, 1 when the address cannot be listened on. A mistake on
        the command line exits with 2 before that.
    """
    config = parse_args(argv)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(config))
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    return 0


async def serve(config: RouterConfig) -> None:
    """Serve until a signal arrives, then let running requests finish.

    Raises: ConfigError, when the address cannot be listened on.
    """
    pool = ServerPool(
        config.attn_urls, POLICIES[config.policy], max_missed_polls=config.max_missed_polls
    )
    async with open_session(config) as session:
        relay = Relay(config, pool, session)
        runner = web.AppRunner(
            build_app(config, pool, relay),
            access_log=None,
            auto_decompress=False,
            handler_cancellation=True,
            shutdown_timeout=CLEANUP_TIMEOUT_S,
        )
        await runner.setup()
        try:
            site = await _listen(runner, config)
            async with watching(pool, session, config):
                await _stop_signal()
                await site.stop()
                await relay.drain(config.shutdown_timeout_s)
        finally:
            await runner.cleanup()


async def _listen(runner: web.AppRunner, config: RouterConfig) -> web.TCPSite:
    site = web.TCPSite(runner, config.host, config.port)
    try:
        await site.start()
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {cause}; choose an address of this "
            "host with --host and a free port with --port (0 picks one), or stop what holds it"
        ) from error
    host, port = runner.addresses[0][:2]
    logger.info(
        "listening on http://%s:%d, policy %s, %d attention servers",
        f"[{host}]" if ":" in host else host,
        port,
        config.policy,
        len(config.attn_urls),
    )
    return site


async def _stop_signal() -> None:
    """Wait for SIGTERM or SIGINT; from then on they do what they do to any process."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
    for number in signals:
        loop.remove_signal_handler(number)


if __name__ == "__main__":
    sys.exit(main())
