#!/usr/bin/env bash
# remote_kit.sh OUT_DIR [PENSTOCK_WHEEL]: what the experiment remote needs on a machine without a network: wheels and a server.
#
#   OUT_DIR/http-bench       the server and the plain clients, linked statically
#   OUT_DIR/wheels/*.whl     runai-model-streamer with its S3 part, which imports boto3; Penstock where its wheel is given
#
# Some 40 MB. There, with a Python that has torch and numpy, and this directory beside it:
#
#   python -m pip install --no-index --no-deps --target SITE OUT_DIR/wheels/*.whl
#   PYTHONPATH=SITE python -m benchmarks remote /dev/shm/bench --program OUT_DIR/http-bench --server auto --gb 15.19 \
#     --files 4 --device cuda:0 --networks loopback --rounds 3 --budget 540 --output FILE.json
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0" >&2
  exit 2
fi
out=$1
here=$(dirname "$0")
mkdir -p "$out/wheels"

# A C library of the machine's own is then not needed. Its resolver of names is, but 127.0.0.1 is none.
host=$(rustc -vV | sed -n 's/^host: //p')
target=${CARGO_TARGET_DIR:-$here/http/target}
RUSTFLAGS='-C target-feature=+crt-static' cargo build --release --locked --manifest-path "$here/http/Cargo.toml" \
  --target "$host" --target-dir "$target"
cp "$target/$host/release/http-bench" "$out/http-bench"

pip=(python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp
  --python-version "${PYTHON_VERSION:-3.12}")
for glibc in 17 27 28 30; do
  pip+=(--platform "manylinux_2_${glibc}_x86_64")
done
"${pip[@]}" --platform manylinux2014_x86_64 --dest "$out/wheels" \
  runai-model-streamer==0.17.0 runai-model-streamer-s3==0.17.0 humanize==4.17.0 \
  boto3==1.44.5 botocore==1.44.5 s3transfer==0.19.3 jmespath==1.1.0 python-dateutil==2.9.0.post0 six==1.17.0 urllib3==2.8.0
if [ $# -eq 2 ]; then cp "$2" "$out/wheels"; fi
ls -l "$out" "$out/wheels"
