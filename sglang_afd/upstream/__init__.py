"""The only package that imports SGLang; every touch-point stands in docs/upstream.md.

Nothing is imported here, so that `cpu_shim` can be the first import of a process.
"""
