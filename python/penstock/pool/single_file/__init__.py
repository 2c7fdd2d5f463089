"""One file that holds a whole image model in its authors' layout: found out what it is, and split into components.

* ``kinds``: which architecture a file holds, by names and shapes. ``configs``: the settings of its components.
* ``components``: modules without memory, and which tensors of the file are theirs. ``converted``: the file, seen as one
  component's checkpoint. ``opened``: all of it together.

Names and shapes are diffusers' business: its own conversions are used, on lazy tensors, so nothing is read before it
is wanted, and then straight to its place.
"""

from penstock.pool.single_file.converted import ConvertedCheckpoint
from penstock.pool.single_file.opened import SingleFile, open_single_file

__all__ = ["ConvertedCheckpoint", "SingleFile", "open_single_file"]
