"""What a child process of a block does: decode when told to, or serve experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from step import weights
from step.channel import Channel, ChannelClosed, Message, connect
from step.decoding import Around, Decoder, nothing_around
from step.kernels import KernelTimes


def run(command: dict[str, Any]) -> int:
    """The child that `command` describes; returns its exit code."""
    channel = connect(command["door"])
    channel.send({"name": command["name"]})
    if command["is_dummy"]:
        weights.replace_dummy_weights()
    channel.send({"is": "here"})
    match command["kind"]:
        case "colocated":
            return _colocated(command, channel)
        case "attn":
            return _attention(command, channel)
        case "mlp":
            return _mlp(command, channel)
    raise ValueError(f"unknown kind of child {command['kind']}")


def _colocated(command: dict[str, Any], channel: Channel) -> int:
    from sglang.srt.server_args import prepare_server_args

    decoder = _load(lambda: Decoder(prepare_server_args(command["argv"]), nothing_around), channel)
    return _obey(decoder, channel, lambda: None)


def _attention(command: dict[str, Any], channel: Channel) -> int:
    from step.attention import AttentionRole

    role = AttentionRole(command["argv"])
    around: Around = role.around
    decoder = _load(lambda: Decoder(role.server_args, around), channel)
    role.wait_attached()
    channel.send({"is": "attached"})
    return _obey(decoder, channel, role.check, role.close)


def _load(make: Any, channel: Channel) -> Decoder:
    started_s = time.monotonic()
    decoder: Decoder = make()
    channel.send(
        {
            "is": "loaded",
            "load_s": round(time.monotonic() - started_s, 2),
            "pool_tokens": decoder.pool_tokens,
            "num_graphs": decoder.num_graphs,
        }
    )
    return decoder


@torch.no_grad()
def _obey(
    decoder: Decoder,
    channel: Channel,
    check: Callable[[], None],
    close: Callable[[], None] = lambda: None,
) -> int:
    """Do what the benchmark asks until it has enough.

    Args:
        decoder: Of this process.
        channel: To the benchmark.
        check: Raises when what was done is worthless.
        close: Called at the end.
    """
    while True:
        try:
            order = channel.receive()
        except ChannelClosed:
            return 1
        match order["do"]:
            case "probe":
                import numpy as np

                np.save(order["file"], decoder.probe())
                answer: Message = {}
            case "prepare":
                decoder.prepare(
                    first_row=order["first_row"],
                    num_rows=order["num_rows"],
                    context=order["context"],
                    is_cached=order["is_cached"],
                )
                answer = {}
            case "decode":
                wall, device = decoder.decode(warm=order["warm"], steps=order["steps"])
                answer = {"step_ms": wall, "device_ms": device}
                answer["stream_ms"] = decoder.decode_stream(order["steps"])
            case "touched":
                answer = {"touched": decoder.touched()}
            case "profile":
                with KernelTimes() as times:
                    decoder.decode_plain(order["steps"])
                answer = {"kernels": times.events}
            case "end":
                close()
                channel.send({"is": "end"})
                return 0
            case _:
                raise ValueError(f"unknown order {order}")
        check()
        channel.send({"is": order["do"]} | answer)


def _mlp(command: dict[str, Any], channel: Channel) -> int:
    """The real server; a thread of ours waits until its kernels are to be recorded."""
    from sglang_afd import launch_server

    threading.Thread(target=_record, args=(channel,), daemon=True).start()
    return launch_server.main(command["argv"])


def _record(channel: Channel) -> None:
    times: KernelTimes | None = None
    while True:
        try:
            order = channel.receive()
        except ChannelClosed:
            return  # the benchmark is gone, and the zygote ends this process
        if order["do"] == "record":
            times = KernelTimes()
            times.__enter__()
            channel.send({"is": "record"})
        elif order["do"] == "recorded":
            assert times is not None, "nothing is being recorded"
            times.__exit__()
            channel.send({"is": "recorded", "kernels": times.events})
