"""Attention-FFN disaggregation for serving mixture-of-experts models on SGLang."""

__version__ = "0.1.0"
