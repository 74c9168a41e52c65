"""CPU bodies for the few functions of SGLang that serve a request and run on a GPU only.

They are put in place while SGLang's modules load, before anybody imports the names (cpu_shim.py).
They are no AFD hooks: a stock server that is to run on a CPU needs them as well.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def gated_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Add the shared expert's output, scaled by its gate, to the routed experts' sum, in place.

    Args:
        hidden_states: [T, H], what the gate looks at.
        gate_weight: [H].
        shared_output: [T, H].
        final_hidden_states: [T, H], changed.
    """
    gate = (hidden_states @ gate_weight).sigmoid()
    final_hidden_states += gate.unsqueeze(1) * shared_output


def allocate_token_bitmask(vocab_size: int, batch_size: int) -> Tensor:
    """A mask that allows every token, in ordinary memory: there is no accelerator to pin it for.

    Returns: [batch_size, vocab_size / 32 rounded up] int32.
    """
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place, with xgrammar's CPU kernel.

    Args:
        logits: [B, V], changed.
        vocab_mask: Of `allocate_token_bitmask`.
    """
    import xgrammar

    in_float = logits.float()  # the kernel knows float32 only
    xgrammar.apply_token_bitmask_inplace(in_float, vocab_mask)
    if in_float is not logits:
        logits.copy_(in_float)


def _apply_vocab_mask_method(self: object, logits: Tensor, vocab_mask: Tensor) -> None:
    apply_vocab_mask(logits, vocab_mask)


# By module, then by name in it; a dot leads into a class.
BODIES: dict[str, dict[str, Callable[..., Any] | staticmethod[..., Any]]] = {
    "sglang.kernels.ops.elementwise.elementwise": {"fused_gate_sigmoid_mul_add": gated_add},
    "sglang.srt.constrained.xgrammar_backend": {
        "_allocate_token_bitmask": allocate_token_bitmask,
        "XGrammarGrammar.apply_vocab_mask": _apply_vocab_mask_method,
        "XGrammarGrammarBackend.apply_vocab_mask": staticmethod(apply_vocab_mask),
    },
}


def put_in_place(module: types.ModuleType) -> None:
    """Replace what `BODIES` names in a module that was just executed.

    Raises:
        ImportError: A name is not there; another SGLang than the pinned one is installed.
    """
    for name, body in BODIES[module.__name__].items():
        owner: Any = module
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        if not hasattr(owner, last):
            raise ImportError(f"{module.__name__} has no {name}; is this SGLang 0.5.17?")
        setattr(owner, last, body)
