#!/usr/bin/env bash
# The servers that the tests of remote stores talk to, built or installed by their ordinary clients into a cache.
#
#   tools/servers.sh            fetches what is missing (about four minutes the first time) and prints name=path lines
#   tools/servers.sh --cached   prints what is there, fetches nothing
#
# versitygw        S3 over a directory            needs go
# fake-gcs-server  Google Cloud Storage           needs go
# azurite          Azure Blob Storage             needs npm
#
# A server whose toolchain is absent is left out, with a word on stderr; its tests are skipped and say so.
set -euo pipefail

cache="${PENSTOCK_TEST_SERVERS:-${XDG_CACHE_HOME:-$HOME/.cache}/penstock}"
fetch=true
[ "${1:-}" = --cached ] && fetch=false
mkdir -p "$cache/bin"

# One fetch at a time: tests of several crates may ask at once.
exec 9>"$cache/lock"
flock 9

go_server() {
  local name=$1 package=$2 path="$cache/bin/$1"
  if [ ! -x "$path" ] && $fetch; then
    if command -v go >/dev/null; then
      CGO_ENABLED=0 GOBIN="$cache/bin" go install -ldflags='-s -w' "$package" >&2 || true
    else
      echo "$name: go is not installed" >&2
    fi
  fi
  if [ -x "$path" ]; then echo "$name=$path"; fi
}

go_server versitygw github.com/versity/versitygw/cmd/versitygw@v1.8.0
go_server fake-gcs-server github.com/fsouza/fake-gcs-server@v1.56.0

azurite="$cache/azurite/node_modules/.bin/azurite-blob"
if [ ! -e "$azurite" ] && $fetch; then
  if command -v npm >/dev/null; then
    mkdir -p "$cache/azurite"
    (cd "$cache/azurite" && npm install --no-fund --no-audit --silent azurite@3.35.0) >&2 || true
  else
    echo "azurite: npm is not installed" >&2
  fi
fi
if [ -e "$azurite" ]; then echo "azurite=$azurite"; fi
