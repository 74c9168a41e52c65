"""Rows between GPUs of one host, or two processes on one: one-sided, and inside CUDA graphs."""
