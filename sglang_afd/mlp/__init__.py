"""The MLP role: the routed experts of one expert-parallel rank, and nothing else."""
