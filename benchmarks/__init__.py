"""Measurements of Penstock, beside the machine's limits and other loaders.

``bench`` measures and needs no repository; ``published`` reads the results that are kept here and draws the charts.
"""
