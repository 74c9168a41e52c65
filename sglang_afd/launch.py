"""python -m sglang_afd.launch: a router, attention servers and MLP servers on this host.

Without a model path it serves the embedded model. Nothing heavy is imported here: imports take most
of a server's start-up time, and all servers begin theirs at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence

import aiohttp

from sglang_afd.demo import ensure_embedded_model
from sglang_afd.demo.recipe import Recipe
from sglang_afd.errors import AfdError, ConfigError
from sglang_afd.fleet.chat import CHAT_PATH, chat_body, served_model, stream_chat
from sglang_afd.fleet.config import LaunchConfig, parse_args
from sglang_afd.fleet.console import Console
from sglang_afd.fleet.flags import Flags
from sglang_afd.fleet.gpus import visible_gpus
from sglang_afd.fleet.memory import MemoryPlan
from sglang_afd.fleet.memory_report import report_memory
from sglang_afd.fleet.on_gpus import on_gpus
from sglang_afd.fleet.plan import Plan, router_own_url, router_url
from sglang_afd.fleet.probe import wait_until_ready
from sglang_afd.fleet.run import run_fleet
from sglang_afd.fleet.spares import Spares
from sglang_afd.fleet.spec import ServerSpec
from sglang_afd.model_config import require_experts
from sglang_afd.ports import hold_free_ports, hold_port
from sglang_afd.topology import ExpertShard

DEMO_PROMPT = "What is the capital of France?"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, or until the prompt is answered.

    Returns: Exit code: 0, 1 after an error, 2 for what cannot work and was not started, 128 + the
        signal that came before the answer.
    """
    config = parse_args(sys.argv[1:] if argv is None else argv)
    console = Console(quiet=config.quiet)
    try:
        return launch(config, console)
    except AfdError as error:
        console.progress(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def launch(config: LaunchConfig, console: Console) -> int:
    """Find a model and ports for the servers, and run them."""
    with (
        hold_port(config.host, config.port),
        hold_free_ports("127.0.0.1", config.mlp + config.attn + config.spares) as ports,
    ):
        check_experts(config)
        visible = visible_gpus()
        visible.choose(config.gpus)  # refuses one that is not there
        model_path = config.model_path or ensure_embedded_model()
        if not visible.list:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        with on_gpus(config, model_path, visible, console) as gpus:
            plan = Plan(config=config, model_path=model_path, ports=ports, on_gpus=gpus)
            servers, spares = plan.servers(), Spares(config.spares)
            using = use(config, servers, console, spares, gpus.memory)
            code = asyncio.run(run_fleet(servers, using, console, spares=spares))
        return code if config.prompt else 0


def check_experts(config: LaunchConfig) -> None:
    """Refuse what the MLP servers would refuse, once each of them had loaded for a while.

    Raises:
        ConfigError: The model has no experts, or too few for so many servers.
    """
    num_experts = Recipe().num_experts
    if config.model_path is not None:
        flags = Flags(argv=(*config.server_args, *config.mlp_args))
        overrides = flags.text("--json-model-override-args", default="{}")
        num_experts = require_experts(str(config.model_path), overrides)
    ExpertShard(rank=config.mlp - 1, ep_size=config.mlp, num_experts=num_experts)


async def use(
    config: LaunchConfig,
    servers: Sequence[ServerSpec],
    console: Console,
    spares: Spares,
    memory: MemoryPlan,
) -> None:
    """Ask what there is to ask; then return after a prompt, or stay until cancelled."""
    async with aiohttp.ClientSession() as session:
        console.progress("starting " + ", ".join(server.name for server in servers))
        await wait_until_ready(servers, session, console)
        spares.open()
        await report_memory(memory, servers, session, console)
        model = await served_model(session, router_url(config))
        prompt = DEMO_PROMPT if config.demo else config.prompt
        if prompt:
            await ask(config, model, prompt, session, console)
    if config.prompt:
        return
    console.progress(what_next(config, model))
    await asyncio.Event().wait()


async def ask(
    config: LaunchConfig, model: str, prompt: str, session: aiohttp.ClientSession, console: Console
) -> None:
    """Show a prompt and its answer as it streams in."""
    console.progress(f"> {prompt}")
    body = chat_body(model, prompt, config.max_tokens)
    async for text in stream_chat(session, router_url(config), body):
        console.answer(text)
    console.answer("\n")


def what_next(config: LaunchConfig, model: str) -> str:
    """What one may do while it serves."""
    return (
        f"serving at {router_url(config)} until Ctrl-C; see the servers at "
        f"{router_own_url(config)}/ in a browser, or try:\n  {curl_line(config, model)}"
    )


def curl_line(config: LaunchConfig, model: str) -> str:
    """A command that asks the router something."""
    body = json.dumps(chat_body(model, DEMO_PROMPT, config.max_tokens))
    return shlex.join(
        ["curl", "-N", router_url(config) + CHAT_PATH]
        + ["-H", "Content-Type: application/json", "-d", body]
    )


if __name__ == "__main__":
    sys.exit(main())
