"""Step time of two stages that pass micro-batches to each other, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

ATTENTION = "attention"
MLP = "mlp"
ROUND_TRIP = "round trip"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Times of one layer and micro-batch.

    Source: MegaScale-Infer (arXiv 2504.02263) eq. 5 for the fill, with its constraint on the number
    of micro-batches as a third term: a micro-batch needs its own result before its next layer.
    """

    attn_us: float
    mlp_us: float
    exchange_us: float  # one way
    num_layers: int
    num_micro_batches: int
    # The slowest peer's lead over the mean, when the peers' times for a layer vary.
    wait_us: float = 0.0

    @property
    def slowest_us(self) -> float:
        """Of a stage that is never idle: a peer's lead is that of several micro-batches' mean."""
        return max(self.attn_us + self.wait_us / math.sqrt(self.num_micro_batches), self.mlp_us)

    @property
    def round_trip_us(self) -> float:
        """Of one micro-batch through one layer, alone."""
        return self.attn_us + self.wait_us + self.mlp_us + 2 * self.exchange_us

    @property
    def layer_us(self) -> float:
        """From layer to layer, when the pipeline is full."""
        return max(self.num_micro_batches * self.slowest_us, self.round_trip_us)

    @property
    def layers_us(self) -> float:
        """Of all layers, with filling and draining."""
        return (
            (self.num_layers - 1) * self.layer_us
            + self.round_trip_us
            + (self.num_micro_batches - 1) * self.slowest_us
        )

    @property
    def binding(self) -> str:
        """The stage that another one waits for."""
        if self.round_trip_us > self.num_micro_batches * self.slowest_us:
            return ROUND_TRIP
        return MLP if self.slowest_us == self.mlp_us > self.attn_us else ATTENTION
