"""What benchmark/bench_exchange.py is made of: one side for each process, and what they say."""
