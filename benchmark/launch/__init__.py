"""Parts of bench_launch.py."""
