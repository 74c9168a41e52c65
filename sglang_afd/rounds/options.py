"""The numbers behind the rules of a round, and why they are what they are (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """Times in seconds; "of a round" is a share of the measured time of a whole round."""

    # The window. A host gap is far shorter than a round on a GPU, so a fixed cap bounds what a peer
    # that does not come costs. On a CPU gaps of 10 to 50 ms are normal: a cap below them splits the
    # peers into two halves that never meet again, so the cap grows with the rounds and with the
    # gaps of most peers.
    window_cap_s: float = 0.020
    window_cap_of_round: float = 0.5
    window_limit_s: float = 0.5  # the cap never grows beyond this

    # Parking. Below the jitter of a layer it shatters rounds, hence the floors.
    park_of_round: float = 0.5
    park_layers: float = 4.0  # at least so many layers, a short model has few; and so many turns
    min_park_s: float = 0.010
    first_park_s: float = 1.0  # until a round has been measured; the first one may compile kernels

    # Prefill.
    prefill_age_s: float = 0.001  # older than this, a piece goes before the next decode unit
    first_piece_rows: int = 512  # until run times have been measured
    # Length of a piece in decode units. Every piece reads the weights again. Where that read
    # dominates (H200 in simulation, 1 % of the steps prefill) pieces of 1.0 cost 5 % of the
    # throughput and make the decode steps longer, which they are to protect; of 2.0, 1 %.
    piece_units: float = 2.0
    min_piece_rows: int = 64
