"""Memory of a server that is neither weights, cache nor slots: estimates, all in one place.

Source: estimates for SGLang 0.5.17 and torch 2.11 on an H200; of an MLP rank, what the launches in
docs/results held there.
"""

from __future__ import annotations

from sglang_afd.fleet.model_size import ModelSize

GIB = 1 << 30
CONTEXT_BYTES = round(0.75 * GIB)  # CUDA context, loaded kernels, cuBLAS
MPS_SERVER_BYTES = round(0.25 * GIB)  # of each GPU that is shared through MPS
ATTENTION_GRAPHS_BYTES = round(0.5 * GIB)  # decode graphs and the backend's workspace
MLP_GRAPHS_BYTES = round(0.1 * GIB)  # a graph for each layer and row bucket
SPARE_SHARE = 0.02  # of a GPU's free memory is planned for nothing: allocators round up
# Of a GPU with 60 GiB or more, as SGLang chooses them.
PREFILL_ROWS = 8192
DECODE_ROWS = 256
# SGLang's bounds on how many requests its table of token places has room for.
MIN_REQUESTS, MAX_REQUESTS = 2048, 4096
REQUEST_ENTRY_BYTES = 4


def attention_work_bytes(model: ModelSize, *, prefill_rows: int, decode_rows: int) -> int:
    """Graphs and the largest activations of an attention server."""
    itemsize = 4 if model.dtype == "float32" else 2
    # Hidden states, residual, the sum of the experts and two copies; three times queries, keys and
    # values: as projected, as rotated, and what attention makes of them.
    prefill = prefill_rows * itemsize * (5 * model.hidden_size + 3 * model.qkv_size)
    # Logits in the model's dtype, in float32, and as probabilities.
    logits = decode_rows * model.vocab_size * (itemsize + 4 + 4)
    return ATTENTION_GRAPHS_BYTES + prefill + logits


def mlp_work_bytes(model: ModelSize, *, unit_rows: int) -> int:
    """Graphs, staging and the largest activations of an MLP rank."""
    itemsize = 4 if model.dtype == "float32" else 2
    staging = unit_rows * (2 * model.hidden_size * itemsize + model.top_k * 12)
    # Of each choice: gate and up, their product, and the expert's output.
    choices = unit_rows * model.top_k * itemsize * (3 * model.moe_size + model.hidden_size)
    return MLP_GRAPHS_BYTES + staging + choices


def request_table_bytes(num_requests: int, context_length: int) -> int:
    """Where the tokens of each running request are in the cache."""
    return num_requests * (context_length + 4) * REQUEST_ENTRY_BYTES
