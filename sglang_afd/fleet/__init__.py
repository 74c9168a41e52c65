"""Servers of one host as plain processes: started together, watched, stopped together."""
