"""Scripted runs of the rounds, and the pictures of them."""
