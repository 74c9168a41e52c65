"""How the servers on one GPU share its memory, worked out before anything loads (pure).

Everything but the key-value caches has a size of its own; what it leaves is shared equally among
the attention servers of the GPU, as a number of tokens. A fraction would not do: SGLang applies it
to the memory that is free while the other servers load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_afd.config import AUTO_GRAPH_SLOTS, FP8, AfdConfig
from sglang_afd.errors import ConfigError
from sglang_afd.fleet import overheads
from sglang_afd.fleet.flags import Flags
from sglang_afd.fleet.gpus import Gpu
from sglang_afd.fleet.model_size import ModelSize
from sglang_afd.fleet.overheads import GIB
from sglang_afd.fleet.placement import Placement
from sglang_afd.transport.cuda_ipc.layout import SlabShape

CACHE = "KV cache"
WORK = "graphs and activations"
CONTEXT = "CUDA"


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """What one server will hold on its GPU."""

    name: str
    items: Mapping[str, int]  # bytes by what they are for
    num_tokens: int = 0  # of its key-value cache; 0 where it has none, or SGLang sizes it

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.items.values())

    @property
    def is_whole(self) -> bool:
        """Is everything planned? Not the cache of an attention server alone on its GPU."""
        return self.num_tokens > 0 or not self.name.startswith("attn")

    def describe(self) -> str:
        """In GiB, item by item."""
        items = [f"{name} {_gib(size)}" for name, size in self.items.items()]
        tokens = f", {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{self.name} {_gib(self.num_bytes)} GiB ({', '.join(items)}{tokens})"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Every server of a launch."""

    servers: Mapping[str, ServerMemory]

    def flags_of(self, name: str) -> tuple[str, ...]:
        """What makes a server keep to its part."""
        num_tokens = self.servers[name].num_tokens if name in self.servers else 0
        if not num_tokens:
            return ()
        # The fraction only bounds the tokens from above, by what is free at that moment less 1 % of
        # the GPU, which the graphs that follow need anyway.
        return ("--max-total-tokens", str(num_tokens), "--mem-fraction-static", "0.99")


@dataclass(frozen=True, kw_only=True)
class MemoryPlanner:
    """Plans for one launch.

    Raises:
        ConfigError: From `plan`, when a GPU's memory does not suffice; it names every item.
    """

    model: ModelSize
    placement: Placement
    num_ranks: int  # MLP ranks
    attn_flags: Flags
    mlp_flags: Flags
    has_mps: bool

    def plan(self) -> MemoryPlan:
        """Every GPU whose memory is known."""
        servers: dict[str, ServerMemory] = {}
        for index, gpu in enumerate(self.placement.gpus):
            names = [name for name, its in self.placement.index_of.items() if its == index]
            if names and gpu.free_bytes:
                servers |= {server.name: server for server in self._on_gpu(index, gpu, names)}
        return MemoryPlan(servers=servers)

    def _on_gpu(self, index: int, gpu: Gpu, names: Sequence[str]) -> list[ServerMemory]:
        without_cache = [self._without_cache(name, gpu) for name in names]
        attention = [server for server in without_cache if server.name.startswith("attn")]
        left = self._free(gpu, is_shared=len(names) > 1)
        left -= sum(server.num_bytes for server in without_cache)
        share = left // max(1, len(attention))
        wanted = self.attn_flags.number("--max-total-tokens", 0)
        # A request of full length must fit, or the user must want fewer tokens.
        least = wanted or self.model.context_length
        if share < (self._cache_bytes(least) if attention else 0):
            planned = [self._with_cache(server, least) for server in without_cache]
            raise ConfigError(self._complaint(index, gpu, planned, least))
        if len(names) == 1 and not wanted:
            return without_cache  # SGLang takes what is free
        num_tokens = wanted or self._tokens_in(share)
        return [self._with_cache(server, num_tokens) for server in without_cache]

    def _without_cache(self, name: str, gpu: Gpu) -> ServerMemory:
        items = {CONTEXT: overheads.CONTEXT_BYTES}
        if name.startswith("mlp"):
            if self._holds_experts(name):
                items["experts"] = self.model.rank_bytes(self.num_ranks)
            items[WORK] = overheads.mlp_work_bytes(
                self.model, unit_rows=self._max_rows(self.mlp_flags)
            )
            return ServerMemory(name=name, items=items)
        items["weights"] = self.model.attention_bytes
        items["slots"] = self._slab_bytes()
        is_large = gpu.total_bytes >= 60 * GIB
        rows = overheads.PREFILL_ROWS if is_large else overheads.PREFILL_ROWS // 2
        items[WORK] = overheads.attention_work_bytes(
            self.model,
            prefill_rows=self.attn_flags.number("--chunked-prefill-size", rows),
            decode_rows=self.attn_flags.number("--cuda-graph-max-bs-decode", overheads.DECODE_ROWS),
        )
        return ServerMemory(name=name, items=items)

    def _with_cache(self, server: ServerMemory, num_tokens: int) -> ServerMemory:
        if not server.name.startswith("attn"):
            return server
        items = {**server.items, CACHE: self._cache_bytes(num_tokens)}
        return ServerMemory(name=server.name, items=items, num_tokens=num_tokens)

    def _holds_experts(self, name: str) -> bool:
        """A spare holds none until it takes the place of a rank, whose memory is free by then.

        That is so only if whichever rank ends, ends on the spare's own GPU.
        """
        index_of = self.placement.index_of
        ranks = {index_of[f"mlp-{rank}"] for rank in range(self.num_ranks)}
        is_spare = int(name.partition("-")[2]) >= self.num_ranks
        return not (is_spare and ranks == {index_of[name]})

    def _slab_bytes(self) -> int:
        wanted = self.attn_flags.text("--afd-num-micro-batches", default="auto")
        if self.attn_flags.text("--afd-transport") == "zmq":
            return 0
        room = self.attn_flags.number("--afd-max-mlp-ranks", self.num_ranks)
        return SlabShape(
            num_slots=int(wanted) if wanted.isdigit() else AUTO_GRAPH_SLOTS,
            max_ranks=max(room, self.num_ranks),
            max_rows=self._max_rows(self.attn_flags),
            hidden_size=self.model.hidden_size,
            top_k=self.model.top_k,
            dtype=self.model.dtype,
            is_fp8=self.attn_flags.text("--afd-dispatch-dtype") == FP8,
        ).num_bytes

    def _max_rows(self, flags: Flags) -> int:
        return flags.number("--afd-max-rows", default_of("max_rows"))

    def _free(self, gpu: Gpu, *, is_shared: bool) -> int:
        server = overheads.MPS_SERVER_BYTES if self.has_mps and is_shared else 0
        return gpu.free_bytes - round(gpu.free_bytes * overheads.SPARE_SHARE) - server

    def _cache_bytes(self, num_tokens: int) -> int:
        table = overheads.request_table_bytes(
            self._num_requests(num_tokens), self.model.context_length
        )
        return num_tokens * self.model.kv_bytes_per_token + table

    def _num_requests(self, num_tokens: int) -> int:
        wanted = self.attn_flags.number("--max-running-requests", 0)
        if not wanted:
            estimate = num_tokens * 512 // self.model.context_length
            wanted = max(min(estimate, overheads.MAX_REQUESTS), overheads.MIN_REQUESTS)
        return min(wanted, num_tokens // 2)

    def _tokens_in(self, num_bytes: int) -> int:
        """As many as fit, and no more than the largest number of requests can use."""
        table = self._cache_bytes(num_bytes // self.model.kv_bytes_per_token)
        table -= num_bytes // self.model.kv_bytes_per_token * self.model.kv_bytes_per_token
        num_tokens = (num_bytes - table) // self.model.kv_bytes_per_token
        return min(num_tokens, overheads.MAX_REQUESTS * self.model.context_length)

    def _complaint(
        self, index: int, gpu: Gpu, planned: Sequence[ServerMemory], num_tokens: int
    ) -> str:
        needed = sum(server.num_bytes for server in planned)
        usable = self._free(gpu, is_shared=len(planned) > 1)
        lines = "".join(f"\n  {server.describe()}" for server in planned)
        return (
            f"the servers on GPU {index} ({gpu.model}) need {_gib(needed)} GiB with a cache of "
            f"{num_tokens} tokens each; {_gib(usable)} of {_gib(gpu.total_bytes)} GiB can be used:"
            f"{lines}\nuse a smaller --attn, `-- --context-length` or `-- --max-total-tokens`, "
            f"more GPUs, or a smaller model"
        )


def default_of(field: str) -> int:
    """The default of one of the servers' own flags."""
    return int(AfdConfig.__dataclass_fields__[field].default)  # type: ignore[arg-type]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"
