#!/usr/bin/env bash
# Installs CTranslate2 for processors as a user does, and converts the demo model for it.
# Usage: build_ctranslate2.sh <program weft> <environment of build_conversion.sh> <GGUF file of the demo model> <target home>;
# the model ends up in its folder smollm2.
set -euo pipefail
weft=$1
conversion=$2
gguf=$3
target=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$weft" runtime install ctranslate2 --variant cpu --home "$target"
# From 32-bit floats: CTranslate2 falls back to another type for a bfloat16 source.
"$conversion/bin/python" "$(dirname "$0")/unpack_smollm2.py" "$gguf" "$work/hf" float32
copied=(tokenizer.json tokenizer_config.json)
[ -e "$work/hf/chat_template.jinja" ] && copied+=(chat_template.jinja)
"$conversion/bin/ct2-transformers-converter" --force --model "$work/hf" --output_dir "$target/smollm2" --quantization int8 \
  --copy_files "${copied[@]}"
