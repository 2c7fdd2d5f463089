"""Measurements of Penstock, beside the machine's limits and other loaders.

``penstock.bench`` measures, and needs no repository. Here are experiments that are ours alone (``experiments`` and
``cli``), the results that are kept, and ``published``, which draws the charts of them.
"""
