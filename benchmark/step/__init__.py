"""Parts of bench_step.py: decode steps of stock SGLang and of split roles on one device."""
