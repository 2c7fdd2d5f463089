"""Builds a model of a local directory by the stock loader, and of an object store by Penstock, and compares them.

    python vllm_from_s3.py DIRECTORY LOCATION [EXTRA]

EXTRA is what ``--model-loader-extra-config`` takes. Prints the names of parameters and buffers that differ, and what
Penstock did, as JSON. Nothing is computed with either.
"""

from __future__ import annotations

import json
import sys

from vllm_classes import begin, configured, loaded

from penstock.integrations.vllm import last_load
from penstock.recording import differing


def main(directory: str, location: str, extra: str = "{}") -> None:
    begin()
    stock = loaded(configured(directory, "auto"))
    ours = loaded(configured(location, "penstock", **json.loads(extra)))
    statistics = last_load()
    assert statistics is not None
    print("RESULT " + json.dumps([differing(ours, stock), statistics.as_dict()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
