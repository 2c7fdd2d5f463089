#!/usr/bin/env bash
# What the manual's recording shows: real commands, typed by nobody. It runs in a directory with a checkpoint, `model/`, and
# an S3 server that has the same as s3://models/llama-3-8b/.
export PS1= COLUMNS=88
typed() {
  printf '\033[32m$\033[0m '
  local text=$1 at
  for ((at = 0; at < ${#text}; at += 4)); do
    printf '%s' "${text:at:4}"
    sleep 0.15
  done
  sleep 0.4
  printf '\n'
  bash -c "$text"
  sleep "${2:-2}"
}
typed 'penstock inspect s3://models/llama-3-8b/ --limit 3' 3
typed 'penstock load s3://models/llama-3-8b/ --stats' 5
typed 'penstock pull s3://models/llama-3-8b/ here' 2
typed 'penstock load here/model.safetensors.index.jsn' 3
