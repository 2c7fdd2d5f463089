"""Seconds until an engine's first answer, by the steps of ``penstock.start``.

``bench`` says what is measured; ``tasks`` starts an engine and watches it; ``engines`` knows their commands.
``program`` is what a transformers program does: a script of its own, which imports nothing of this.
"""
