#!/usr/bin/env bash
# Finds what tests alone do not see: undefined behaviour (Miri), bad addresses and leaks (AddressSanitizer), data races
# (ThreadSanitizer). docs/testing.md says what runs under which, and why not all of it under each.
#
#   tools/sanitize.sh [miri] [address] [thread]      all three where none is named
#
# Needs a nightly toolchain with two components:
#   rustup toolchain install nightly --component rust-src --component miri
set -euo pipefail
cd "$(dirname "$0")/.."
host=$(rustc +nightly -vV | sed -n 's/^host: //p')
built=${CARGO_TARGET_DIR:-target}/sanitize
# The engine's own tests, the pipeline's under its simulated device, and every store's.
tests=(-p penstock --lib --test pipeline --test store_conformance)
# System calls through the C library, where sanitizers see them: memory that is mapped anew is not the memory it was.
flags="--cfg rustix_use_libc"
# Slower by ten times and more, so property tests try less.
export PROPTEST_CASES=${PROPTEST_CASES:-32}

miri() {
  # Addresses of destinations go through integers by design: a device's are no pointers at all.
  MIRIFLAGS="-Zmiri-permissive-provenance" CARGO_TARGET_DIR=$built/miri \
    cargo +nightly miri test -p penstock --lib -- memory::window pipeline::landing
}

address() {
  RUSTFLAGS="-Zsanitizer=address $flags" ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1} \
    CARGO_TARGET_DIR=$built/address cargo +nightly test --target "$host" "${tests[@]}"
}

thread() {
  # The standard library is built with it too: else its locks are not seen. Children of a process with threads are left
  # out: the sanitizer gives them a lock that no thread of theirs will release.
  RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer $flags" \
    TSAN_OPTIONS=${TSAN_OPTIONS:-suppressions=$PWD/tools/tsan.supp} \
    CARGO_TARGET_DIR=$built/thread cargo +nightly test -Zbuild-std --target "$host" "${tests[@]}" -- --skip child
}

for what in "${@:-miri address thread}"; do
  for one in $what; do
    case $one in
      miri | address | thread) echo "== $one" && "$one" ;;
      *) echo "not one of miri, address, thread: $one" >&2 && exit 2 ;;
    esac
  done
done
