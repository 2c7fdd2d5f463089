#!/usr/bin/env bash
# fetch_rivals.sh OUT_DIR: fetches the wheels of all loaders that the experiment rivals compares, for a machine without a network.
#
#   OUT_DIR/rivals/                  one version of each rival, and what they import
#   OUT_DIR/safetensors-VERSION/     each version of safetensors by itself
#
# For CPython 3.12 on x86-64 with glibc 2.30 or newer; PYTHON_VERSION=3.13 and so on for another. Not fetched: torch,
# numpy, psutil, and Penstock. There, then:
#
#   for part in OUT_DIR/*/; do
#     python -m pip install --no-index --no-deps --target "SITES/$(basename "$part")" "$part"*.whl
#   done
#   PYTHONPATH=SITES/rivals python -m benchmarks rivals DIRECTORY --output FILE.json \
#     --site safetensors=SITES/safetensors-0.8.0 --site safetensors@0.9=SITES/safetensors-0.9.0rc1 \
#     --site safetensors-prefetch=SITES/safetensors-0.9.0rc1
set -euo pipefail

if [ $# -ne 1 ]; then
  sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0" >&2
  exit 2
fi
out=$1
pip=(python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp
  --python-version "${PYTHON_VERSION:-3.12}")
for glibc in 17 27 28 30; do
  pip+=(--platform "manylinux_2_${glibc}_x86_64")
done
pip+=(--platform manylinux2014_x86_64)

# tensorizer imports boto3 and redis even for local files, and libnacl even without encryption (libsodium itself is not
# needed); runai imports humanize. instanttensor and fastsafetensors import torch alone.
"${pip[@]}" --dest "$out/rivals" \
  runai-model-streamer==0.17.0 runai-model-streamer-s3==0.17.0 humanize==4.17.0 \
  fastsafetensors==0.5.0 \
  instanttensor==0.2.2 \
  tensorizer==2.12.1 boto3==1.44.5 botocore==1.44.5 s3transfer==0.19.3 jmespath==1.1.0 python-dateutil==2.9.0.post0 six==1.17.0 \
  urllib3==2.8.0 redis==8.1.0 libnacl==2.1.0
for version in 0.8.0 0.9.0rc1; do
  "${pip[@]}" --dest "$out/safetensors-$version" "safetensors==$version"
done
du -sh "$out"/*/ "$out"
