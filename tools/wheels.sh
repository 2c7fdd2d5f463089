#!/usr/bin/env bash
# The wheels of a release, built on any Linux with Rust: tools/wheels.sh DIRECTORY [TARGET…]
#
# For each target a wheel for all Python versions from 3.10 (abi3), one for free-threaded 3.14, which cannot load it, and
# one for all versions from 3.15, with a GIL and without (abi3t). zig links against glibc 2.28, so wheels run on RHEL 8,
# Debian 10, Ubuntu 20.04 and newer, or against musl 1.2. maturin and ziglang are taken from PyPI to an environment of
# their own.
set -euo pipefail
out=$(realpath -m "${1:?the directory for the wheels}")
shift
targets=("$@")
[ $# -gt 0 ] || targets=({x86_64,aarch64}-unknown-linux-{gnu,musl})
cd "$(dirname "$0")/.."
tools=${XDG_CACHE_HOME:-$HOME/.cache}/penstock/wheel-tools
if [ ! -x "$tools/bin/maturin" ]; then
  "${PYTHON:-python3}" -m venv "$tools"
  "$tools/bin/pip" install -q 'maturin>=1.16,<2' 'ziglang>=0.15'
fi
export PATH=$tools/bin:$PATH
# The licences of what is linked travel in the wheel, beside the list of it (SBOM) that maturin makes.
[ -x "$tools/bin/cargo-about" ] || cargo install -q cargo-about --locked --features cli --root "$tools"
[ THIRD_PARTY_NOTICES.txt -nt Cargo.lock ] ||
  cargo-about generate --locked -c tools/notices/about.toml --manifest-path crates/penstock-python/Cargo.toml \
    tools/notices/notices.hbs -o THIRD_PARTY_NOTICES.txt
for target in "${targets[@]}"; do
  rustup target add "$target" 2>/dev/null
  case $target in *-musl) libc=musllinux_1_2 ;; *) libc=manylinux_2_28 ;; esac
  for python in '' python3.14t python3.15t; do
    maturin build --release --locked --zig --target "$target" --compatibility "$libc" \
      ${python:+--interpreter "$python"} --out "$out"
  done
done
maturin sdist --out "$out"
python tools/check_wheels.py "$out"
