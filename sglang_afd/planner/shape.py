"""ModelShape: what the step time depends on in a model; sizes only, no weights."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One mixture-of-experts model. Counts are per layer unless the name says otherwise."""

    name: str
    num_layers: int  # all layers of the model
    num_moe_layers: int  # those with routed experts
    num_kv_layers: int  # those whose cache grows with the context; linear attention has none
    hidden_size: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0  # all shared experts of a layer together
    dense_intermediate_size: int = 0  # of the layers without routed experts
    attention_weights: int  # weights of the projections into and out of core attention
    kv_elements_per_token: int  # cached numbers of one token
    core_flops_per_cached_token: int  # of one new token against one cached token
    vocab_size: int
    weight_bytes: float  # of one projection or expert weight: 1 FP8, 2 BF16, 0.5 FP4
    kv_element_bytes: float = 2.0  # of one cached number
    dispatch_element_bytes: float = 1.0  # of one number on the way to the experts
    combine_element_bytes: float = 2.0  # of one number on the way back

    def __post_init__(self) -> None:
        checks.printable("model", self.name)
        owner = f"model {self.name}"
        for name in _COUNTS:
            checks.whole(owner, name, getattr(self, name))
            checks.between(owner, name, getattr(self, name), 1, 1e11, "No model is that large.")
        checks.between(owner, "num_experts", self.num_experts, 1, 1e5, "No layer has so many.")
        for name in _SIZES:
            checks.between(
                owner, name, getattr(self, name), 0.25, 8, "Wanted: bytes of one number."
            )
        for name in ("shared_intermediate_size", "dense_intermediate_size"):
            checks.between(owner, name, getattr(self, name) + 1, 1, 1e8, "No layer is that wide.")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{owner}: {self.experts_per_token} experts per token of {self.num_experts} "
                "experts; were the two swapped?"
            )
        if max(self.num_moe_layers, self.num_kv_layers) > self.num_layers:
            raise ConfigError(
                f"{owner}: {self.num_moe_layers} layers with experts and {self.num_kv_layers} with "
                f"a cache, of {self.num_layers} layers in all"
            )

    @property
    def expert_bytes(self) -> float:
        """Gate, up and down projection of one expert in one layer."""
        return 3 * self.hidden_size * self.moe_intermediate_size * self.weight_bytes

    @property
    def expert_flops_per_token(self) -> float:
        """Of one token in one expert: two per weight."""
        return 6.0 * self.hidden_size * self.moe_intermediate_size

    @property
    def router_weights(self) -> int:
        """The gate; it stays on the attention side, in BF16."""
        return self.hidden_size * self.num_experts

    @property
    def dense_weights(self) -> int:
        """What every token passes in one MoE layer outside the routed experts."""
        return self.attention_weights + 3 * self.hidden_size * self.shared_intermediate_size

    @property
    def dense_bytes(self) -> float:
        """Read once per layer and micro-batch outside the routed experts."""
        return self.dense_weights * self.weight_bytes + 2 * self.router_weights

    @property
    def dense_flops_per_token(self) -> float:
        """Two per weight."""
        return 2.0 * (self.dense_weights + self.router_weights)

    @property
    def plain_mlp_weights(self) -> int:
        """The MLP of a layer without routed experts."""
        return 3 * self.hidden_size * self.dense_intermediate_size

    @property
    def plain_mlp_bytes(self) -> float:
        """Of it."""
        return self.plain_mlp_weights * self.weight_bytes

    @property
    def kv_bytes_per_token_layer(self) -> float:
        """Cached bytes of one token in one layer that has a cache."""
        return self.kv_elements_per_token * self.kv_element_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Cached bytes of one token in all layers."""
        return self.kv_bytes_per_token_layer * self.num_kv_layers

    @property
    def head_weights(self) -> int:
        """The LM head."""
        return self.hidden_size * self.vocab_size

    @property
    def head_bytes(self) -> float:
        """Of it, BF16."""
        return 2.0 * self.head_weights

    @property
    def all_dense_bytes(self) -> float:
        """Everything but the routed experts: what every attention GPU holds."""
        plain_layers = self.num_layers - self.num_moe_layers
        return (
            self.num_moe_layers * self.dense_bytes
            + plain_layers * (self.attention_weights * self.weight_bytes + self.plain_mlp_bytes)
            + 2 * self.head_bytes  # the embedding is as large as the head
        )

    @property
    def all_expert_bytes(self) -> float:
        """The routed experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_bytes


_COUNTS = (
    "num_layers",
    "num_moe_layers",
    "num_kv_layers",
    "hidden_size",
    "num_experts",
    "experts_per_token",
    "moe_intermediate_size",
    "attention_weights",
    "kv_elements_per_token",
    "core_flops_per_cached_token",
    "vocab_size",
)
_SIZES = ("weight_bytes", "kv_element_bytes", "dispatch_element_bytes", "combine_element_bytes")
