#!/usr/bin/env bash
# Installs vLLM for processors as a user does, and makes the demo model as vLLM reads it.
# Usage: build_vllm.sh <program weft> <environment of build_conversion.sh> <GGUF file of the demo model> <target home>;
# the model ends up in its folder smollm2.
set -euo pipefail
weft=$1
conversion=$2
gguf=$3
target=$4
"$weft" runtime install vllm --variant cpu --home "$target"
"$conversion/bin/python" "$(dirname "$0")/unpack_smollm2.py" "$gguf" "$target/smollm2" bfloat16
