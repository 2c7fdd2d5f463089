#!/usr/bin/env bash
# gpu_machine.sh WHEELS OUT PART...: tests and benchmarks on a machine that has a GPU, torch and no network.
#
#   WHEELS/*.whl              Penstock's wheel, and what its tests import that the machine lacks
#   WHEELS/rivals/*.whl       what fetch_rivals.sh brings: needed by all but tests, readers, transformers, sleep, sharing and two
#   WHEELS/safetensors-*/     likewise
#   WHEELS/compat/*.whl       compat/runai-model-streamer's wheel, for vllm
#   WHEELS/vllm/part.*        a vLLM, packed as `tar | xz | split`, for vllm, sleep and two
#   WHEELS/http-bench         the server that remote_kit.sh builds, for remote
#
# Each PART leaves a JSON or a log of its name in OUT. ROUNDS (3), BUDGET (seconds for one part, 400), LOADERS (that
# rivals compares, by comma: all), STATES (of the page cache, for vllm and transformers: warm,cold) and DATA (a
# directory on a disk, /data) may be set, and more options of the experiments rivals (RIVALS) and engines_vllm (VLLM).
# Parts:
#
#   tests                     everything that needs a GPU
#   cold warm tmpfs half one small cores
#                             rivals: a state of the page cache, one tensor of 12 GB, 100,000 tensors, 4 cores
#   readers                   the number of readers that is found, beside fixed ones
#   disk                      disk: plain readers, Penstock and fastsafetensors, file by file
#   transformers              engines
#   vllm                      engines_vllm; FORMATS may be set
#   sleep                     vLLM's sleep levels
#   sharing                   sharing, on two GPUs
#   two                       tests that need two GPUs: vLLM's ranks, and those of compat/runai-model-streamer
#   remote                    remote over loopback, to the GPU
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,/^set/{s/^# \{0,1\}//;/^set/d;p}' "$0" >&2
  exit 2
fi
wheels=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2")
shift 2
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} data=${DATA:-/data} sites=${SITES:-/tmp/penstock-sites} rounds=${ROUNDS:-3} budget=${BUDGET:-400}
states=${STATES:-warm,cold}
mkdir -p "$data" "$sites"

# site NAME WHEEL...: unpacks wheels to a directory of their own, once.
site() {
  local to=$sites/$1
  shift
  [ -e "$to" ] || "$python" -m pip install -q --no-index --no-deps --no-compile --target "$to" "$@"
}

unpack_vllm() {
  [ -e "$sites/vllm" ] || cat "$wheels"/vllm/part.* | "$python" -c "import lzma, sys, tarfile
tarfile.open(fileobj=lzma.open(sys.stdin.buffer), mode='r|').extractall('$sites/vllm', filter='fully_trusted')"
}

rivals() {
  local name version chosen=(${LOADERS:+--loaders "$LOADERS"})
  site rivals "$wheels"/rivals/*.whl
  # Who names a loader's packages asks for the loader too.
  while read -r name version; do
    [[ ,${LOADERS:-$name}, == *,$name,* ]] || continue
    site "safetensors-$version" "$wheels/safetensors-$version"/*.whl
    chosen+=(--site "$name=$sites/safetensors-$version")
  done <<< "safetensors 0.8.0
safetensors@0.9 0.9.0rc1
safetensors-prefetch 0.9.0rc1"
  PYTHONPATH=$PYTHONPATH:$sites/rivals "$python" -m benchmarks rivals --rounds "$rounds" --budget "$budget" \
    "${chosen[@]}" ${RIVALS:-} "$data" "$@"
}

part() {
  case $1 in
    tests) (cd "$here/.." && "$python" -m pytest -q -rs -m gpu tests/test_gpu.py tests/test_engine_gpu.py \
      tests/test_remote.py) ;;
    cold | warm | half) rivals --output "$out/$1.json" --cases llama --states "$1" ;;
    tmpfs) rivals --output "$out/tmpfs.json" --cases llama --states tmpfs ;;
    one) rivals --output "$out/one.json" --cases one-tensor --states warm ;;
    small) rivals --output "$out/small.json" --cases small-tensors --states warm ;;
    cores) rivals --output "$out/cores.json" --cases llama --states warm --cores 0-3 ;;
    readers)
      "$python" -m benchmarks readers "$data" --gb 15.2 --device cuda:0 --rounds "$rounds" --output "$out/readers.json"
      ;;
    disk)
      site rivals "$wheels"/rivals/*.whl
      PYTHONPATH=$PYTHONPATH:$sites/rivals "$python" -m benchmarks disk "$data" --rounds "$rounds" --budget "$budget" \
        --loaders "${LOADERS:-plain:threads=16|8+kib=512,penstock:cache=bypass,penstock:cache=bypass+readers=16,fastsafetensors}" --output "$out/disk.json"
      ;;
    transformers)
      "$python" -m benchmarks engines "$data" --rounds "$rounds" --states "$states" --output "$out/transformers.json"
      ;;
    vllm)
      site compat "$wheels"/compat/*.whl
      site rivals "$wheels"/rivals/*.whl
      unpack_vllm
      local theirs=vllm-runai_streamer ours=vllm-runai_streamer@penstock on_gpu=distributed=true
      PYTHONPATH=$PYTHONPATH:$sites/vllm:$sites/rivals "$python" -m benchmarks engines_vllm "$data" --rounds "$rounds" \
        --states "$states" --site "$ours=$sites/compat" ${VLLM:-} --output "$out/vllm.json" \
        --loaders "${FORMATS:-vllm-auto,vllm-penstock,vllm-fastsafetensors,$ours:$on_gpu,$ours,$theirs,$theirs:$on_gpu}"
      ;;
    sleep)
      unpack_vllm
      (cd "$here/../tests/engines" && PYTHONPATH=$PYTHONPATH:$sites/vllm "$python" -m pytest -q -rs test_vllm_gpu.py)
      ;;
    two)
      unpack_vllm
      local compat=$here/../compat/runai-model-streamer passed=0
      PYTHONPATH=$PYTHONPATH:$compat/src "$python" -m pytest -q -rs -m gpu "$compat/tests" || passed=$?
      (cd "$here/../tests/engines" && PYTHONPATH=$PYTHONPATH:$sites/vllm \
        "$python" -m pytest -q -rs test_vllm_two_gpus.py) || passed=$?
      return $passed
      ;;
    sharing) "$python" -m benchmarks sharing "$data" --device cuda --output "$out/sharing.json" ;;
    remote)
      site rivals "$wheels"/rivals/*.whl
      PYTHONPATH=$PYTHONPATH:$sites/rivals "$python" -m benchmarks remote /dev/shm/penstock-remote --server auto --gb 15.19 \
        --program "$wheels/http-bench" --files 4 --device cuda:0 --networks loopback --rounds "$rounds" \
        --budget "$budget" --output "$out/remote.json"
      ;;
    *)
      echo "no part $1" >&2
      return 2
      ;;
  esac
}

site penstock "$wheels"/*.whl
export PYTHONPATH=$sites/penstock${PYTHONPATH:+:$PYTHONPATH}:$(dirname "$here")
failed=()
for name in "$@"; do
  began=$SECONDS
  # A part that fails does not take the others with it.
  (part "$name") > "$out/$name.log" 2>&1 || failed+=("$name")
  echo "== $name: $((SECONDS - began)) s" && tail -n 40 "$out/$name.log"
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
