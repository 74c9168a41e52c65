"""Faults that the end-to-end tests plant in a server, to show that they would be noticed."""

from __future__ import annotations

import os
from typing import Any

import gpu_faults
import micro_batch_faults
import stall_faults


def plant(name: str) -> None:
    """Patch this process; the server that runs in it afterwards has the fault, or all with `+`."""
    faults = {
        "other_weights": _other_weights,
        "perturb_topk_weight": _perturb_topk_weight,
        "slow_experts": _slow_experts,
        "experts_of_rank_0": _experts_of_rank_0,
        "mix_up_replies": _mix_up_replies,
        "neglect_the_second_peer": _neglect_the_second_peer,
        "hook_fails": _hook_fails,
        **stall_faults.FAULTS,
        **micro_batch_faults.FAULTS,
        **gpu_faults.FAULTS,
        "drop_intents": lambda: _change_intents(lambda message, before: []),
        "delay_intents": lambda: _change_intents(lambda message, before: [before]),
        "false_intents": lambda: _change_intents(
            lambda message, before: [message, _opposite(message)]
        ),
    }
    for one in name.split("+"):
        faults[one]()


def _other_weights() -> None:
    """The MLP server claims the fingerprint of another checkpoint than the one it serves."""
    from sglang_afd.mlp import server

    claimed = os.environ["TEST_CLAIMED_FINGERPRINT"]
    server.model_fingerprint = lambda server_args: claimed  # type: ignore[assignment]


def _perturb_topk_weight() -> None:
    """The first choice's weight of each row is one percent too large."""
    from sglang_afd.mlp.experts import Experts

    run = Experts.run

    def run_perturbed(self: Experts, layer_id: int, rows: Any) -> Any:
        rows.topk_weights[:, 0] *= 1.01
        return run(self, layer_id, rows)

    Experts.run = run_perturbed  # type: ignore[method-assign]


def _mix_up_replies() -> None:
    """Peers get each other's partial sums, where layer and number of rows are the same."""
    from sglang_afd.transport.zmq_hub import ZmqHub

    reply = ZmqHub.reply
    latest: dict[Any, tuple[bytes, Any]] = {}

    def reply_mixed_up(self: ZmqHub, exchange: Any, partial: Any) -> None:
        place = (exchange.header.layer_id, partial.shape)
        peer, other = latest.get(place, (exchange.peer, partial))
        latest[place] = (exchange.peer, partial.clone())
        reply(self, exchange, partial if peer == exchange.peer else other)

    ZmqHub.reply = reply_mixed_up  # type: ignore[method-assign]


def _neglect_the_second_peer() -> None:
    """What the second attention server sends is seen a third of a second late."""
    import time

    from sglang_afd.transport.base import Arrived, PeerAttached
    from sglang_afd.transport.zmq_hub import ZmqHub

    poll = ZmqHub.poll
    peers: list[bytes] = []
    held: list[tuple[float, Any]] = []

    def poll_late(self: ZmqHub, timeout_s: float) -> list[Any]:
        now_s = time.monotonic()
        seen = [event for due_s, event in held if due_s <= now_s]
        held[:] = [late for late in held if late[0] > now_s]
        for event in poll(self, min(timeout_s, 0.01)):
            if isinstance(event, PeerAttached):
                peers.append(event.peer)
            if isinstance(event, Arrived) and event.exchange.peer in peers[1:2]:
                held.append((now_s + 0.3, event))
            else:
                seen.append(event)
        return seen

    ZmqHub.poll = poll_late  # type: ignore[method-assign]


def _slow_experts() -> None:
    """Every expert run takes longer than the heartbeat timeout."""
    import time

    from sglang_afd.mlp.experts import Experts

    run = Experts.run

    def run_slowly(self: Experts, layer_id: int, rows: Any) -> Any:
        time.sleep(float(os.environ["TEST_EXPERT_DELAY_S"]))
        return run(self, layer_id, rows)

    Experts.run = run_slowly  # type: ignore[method-assign]


def _experts_of_rank_0() -> None:
    """The server loads rank 0's experts, and runs them as those of the rank that it has."""
    from dataclasses import replace

    from sglang_afd.mlp.experts import Experts

    init = Experts.__init__

    def init_wrongly(
        self: Experts, server_args: Any, *, rank: int, ep_size: int, deep_gemm_sms: int
    ) -> None:
        init(self, server_args, rank=0, ep_size=ep_size, deep_gemm_sms=deep_gemm_sms)
        self.shard = replace(self.shard, rank=rank)

    Experts.__init__ = init_wrongly  # type: ignore[method-assign]


def _hook_fails() -> None:
    """SGLang's registry swallows a hook, as it does when applying one raises."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply_target = HookRegistry._apply_target

    def apply_or_skip(target: str, hooks: list[Any]) -> None:
        if target.endswith("get_moe_impl_class"):
            raise RuntimeError("planted")
        apply_target(target, hooks)

    HookRegistry._apply_target = staticmethod(apply_or_skip)  # type: ignore[method-assign]


def _change_intents(change: Any) -> None:
    """What the attention server announces reaches rank 0 changed, a message late, or not at all."""
    from sglang_afd.transport.zmq_link import ZmqLink

    announce = ZmqLink.announce
    before: list[Any] = []

    def announce_changed(self: ZmqLink, message: Any) -> None:
        for said in change(message, before.pop() if before else None):
            if said is not None and said.epoch == self.epoch:
                announce(self, said)
        before.append(message)

    ZmqLink.announce = announce_changed  # type: ignore[method-assign]


def _opposite(message: Any) -> Any:
    """A withdrawal of what was announced, and a step where there is none."""
    from sglang_afd.protocol.messages import Kind, StepIntent, Withdrawal

    if isinstance(message, StepIntent):
        return Withdrawal(epoch=message.epoch, step=message.step)
    return StepIntent(
        epoch=message.epoch,
        step=message.step + 1,
        num_rows=3,
        num_micro_batches=2,
        kind=Kind.DECODE,
    )
