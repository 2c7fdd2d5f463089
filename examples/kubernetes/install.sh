#!/bin/sh
# What the image needs besides the engine's: install.sh [DISTRIBUTION, or the path or URL of a wheel]
#
# Fails while the image is built, and not when a pod starts, if the engine would not find the plugin.
set -eu
python3 -m pip install --no-cache-dir "${1:-penstock-loader}"
penstock --version
python3 - <<'CHECK'
from importlib.metadata import entry_points
from importlib.util import find_spec

groups = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
for engine, group in groups.items():
    if find_spec(engine):
        (plugin,) = entry_points(group=group, name="penstock")
        plugin.load()
        print(f"{engine} finds {plugin.value}")
CHECK
