"""Compile caches that travel: from a location before a start, and to it once the engine has made something new.

* ``places``: the directories in which engines and compilers keep what they compiled, and which files in them count.
* ``key``: what has to be equal for a cache to fit: versions, processor, GPU, driver, model configuration, arguments.
* ``index``: the files that belong to a key, by the hash of their content. ``location``: where indices and blobs lie.
* ``restore``: from a location to the places. ``save``: from the places to a location. ``beside``: both, around a start.

What is restored is code that the engine will run. So it comes from locations that the user named, that nobody else may
write to, and is compared with its hash; names in an index lead nowhere but below the places. Whatever goes wrong here,
the engine starts, and compiles.
"""
