"""What `bench_overlap.py` is made of: planted delays, a tiny model, real servers, traffic."""
