#!/usr/bin/env bash
# Runs the task against a server of ours (first argument: its URL; second: the model's folder, for its tokenizer) with lm-eval's
# `local-completions`, which needs echo and logprobs. LM_EVAL names the lm_eval command.
set -euo pipefail
cd "$(dirname "$0")"
model=$(curl -fsS "$1/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
HF_HUB_OFFLINE=1 "${LM_EVAL:-lm_eval}" --model local-completions \
  --model_args "model=$model,base_url=$1/v1/completions,tokenizer=$2,num_concurrent=4,tokenized_requests=True" \
  --tasks shardline_capitals --include_path .
