#!/usr/bin/env bash
# A Kubernetes API server for the tests of examples/kubernetes: kube-apiserver and etcd, built with go (ten minutes, once),
# and KEDA's kinds. Prints name=path lines, none without go. They are kept in a cache outside of the clone.
set -euo pipefail

kubernetes=1.37.2 etcd=3.7.3 keda=2.21.0
cache="${XDG_CACHE_HOME:-$HOME/.cache}/penstock/kubernetes/$kubernetes-$etcd-$keda"
if [ ! -e "$cache/complete" ]; then
  command -v go >/dev/null || exit 0
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  export GOFLAGS=-mod=mod CGO_ENABLED=0

  # NAME PACKAGE FUNCTION: a program in a module of its own, whose go.mod is on stdin.
  program() {
    mkdir "$work/$1"
    cat >"$work/$1/go.mod"
    printf 'package main\n\nimport (\n%s\n)\n\nfunc main() { %s }\n' "$2" "$3" >"$work/$1/main.go"
    (cd "$work/$1" && go mod tidy && go build -trimpath -ldflags "-s -w ${4:-}" -o "$cache/$1" .) >&2
  }

  # Kubernetes' own module replaces its parts by directories that are not published with it; the parts are modules too.
  parts=$(cd "$work" && go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p' |
    xargs sed -n "s|^\t\(k8s.io/[a-z-]*\) => ./staging.*|replace \1 => \1 v0${kubernetes#1}|p")
  printf 'module apiserver\n\ngo 1.26\n\nrequire k8s.io/kubernetes v%s\n\n%s\n' "$kubernetes" "$parts" |
    program kube-apiserver '"os"; "k8s.io/component-base/cli"; "k8s.io/kubernetes/cmd/kube-apiserver/app"' \
      'os.Exit(cli.Run(app.NewAPIServerCommand()))' "-X k8s.io/component-base/version.gitVersion=v$kubernetes"
  printf 'module etcd\n\ngo 1.26\n\nrequire go.etcd.io/etcd/server/v3 v%s\n' "$etcd" |
    program etcd '"os"; "go.etcd.io/etcd/server/v3/etcdmain"' 'etcdmain.Main(os.Args)'
  module=$(cd "$work" && go mod download -json "github.com/kedacore/keda/v2@v$keda" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  install -m 644 "$module/config/crd/bases/keda.sh_scaledobjects.yaml" "$cache/scaledobjects.yaml"
  touch "$cache/complete"
fi
printf '%s=%s\n' kube-apiserver "$cache/kube-apiserver" etcd "$cache/etcd" keda "$cache/scaledobjects.yaml"
