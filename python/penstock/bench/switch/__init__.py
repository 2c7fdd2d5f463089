"""What it takes to switch between models: reading, building, copying, taking turns, and the way of one request.

``bench`` says what is measured; ``tasks`` carries one measurement out, in a process of its own, with the code of one
part: ``reading`` (files), ``building`` (modules and their order), ``copying`` (host to device), ``turns`` (models that
share a device), ``stages`` (those of a request in three states of the cache). ``models`` has the models and
``arms`` the ways to have them take turns.
"""
