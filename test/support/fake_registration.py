"""What a scripted server answers to the router's own requests: its registration, and pair probes.

All scripted attention servers are attached to one MLP server that no router knows, so that they
make one group.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from sgl_router_afd.pair_probe import REQUEST_ID_PREFIX
from sglang_afd.config import Role
from sglang_afd.protocol.paths import REGISTRATION_PATH
from sglang_afd.protocol.registration import (
    REGISTRATION_VERSION,
    Capacity,
    Condition,
    Load,
    Registration,
    Report,
    encode,
)

__all__ = ["ONE_TOKEN", "REGISTRATION_PATH", "FakeRegistration", "is_pair_probe"]

MLP_PORTS = {"ab": 1, "cd": 2}  # of each model; nobody listens there
MLP_BOOT_ID = "scripted-mlp"
ONE_TOKEN = json.dumps(
    {"text": " a", "output_ids": [5], "meta_info": {"id": "1", "completion_tokens": 1}}
).encode()


def is_pair_probe(request_id: str) -> bool:
    """Does a request with this `X-Request-Id` come from the router itself?"""
    return request_id.startswith(REQUEST_ID_PREFIX)


class FakeRegistration:
    """One process of a scripted server.

    Args:
        models: Names that requests may say.
        fingerprint: Two hexadecimal digits, another pair for another model.
    """

    def __init__(self, models: tuple[str, ...] = ("m",), fingerprint: str = "ab") -> None:
        self.models = models
        self._fingerprint = fingerprint * 32
        self._mlp_port = MLP_PORTS[fingerprint]
        self._mlp_boot_id = f"{MLP_BOOT_ID}-{fingerprint}"
        self._boot_id = uuid.uuid4().hex
        self._started_at_s = time.time()
        self._seq = itertools.count(1)

    def body(self, port: int, status: Mapping[str, Any]) -> bytes:
        """The answer of a server that stands as `status` says: its role, state and reason."""
        role, condition = Role(status["role"]), Condition(status["state"])
        is_attn, is_ready = role is Role.ATTN, condition is Condition.READY
        return encode(
            Registration(
                version=REGISTRATION_VERSION,
                server_id=f"{role}-{port}",
                boot_id=self._boot_id,
                started_at_s=self._started_at_s,
                sent_at_s=time.time(),
                role=role,
                models=self.models if is_attn else (),
                fingerprint=self._fingerprint,
                num_experts=4,
                url=f"http://127.0.0.1:{port}",
                exchange_address="",
                shard=None,
                peer_urls=(f"http://127.0.0.1:{self._mlp_port}",) if is_attn else (),
                capacity=Capacity(max_running_requests=4096, kv_tokens=1_000_000),
                group="",
                epoch=0,
                report=Report(
                    seq=next(self._seq),
                    condition=condition,
                    reason=status.get("reason", ""),
                    attached=(self._mlp_boot_id,) if is_attn and is_ready else (),
                    lost=(),
                    load=Load(
                        num_running=0,
                        num_waiting=0,
                        free_kv_tokens=1_000_000,
                        tokens_per_s=0.0,
                        expert_imbalance=0.0,
                    ),
                    is_draining=False,
                ),
            )
        )
