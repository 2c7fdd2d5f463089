"""Measurements of Penstock, beside the machine's limits and other loaders.

``python -m benchmarks EXPERIMENT`` runs one. Modules import each other relatively, so the package can be moved.
"""
