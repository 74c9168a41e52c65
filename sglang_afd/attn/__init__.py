"""The attention role: an SGLang server whose routed experts run on the MLP servers."""
