#!/usr/bin/env bash
# Installs vLLM for processors as a user does, and makes the demo model as vLLM reads it.
# Usage: build_vllm.sh <program weft> <GGUF file of the demo model> <target home>; the model ends up in its folder smollm2.
set -euo pipefail
weft=$1
gguf=$2
target=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$weft" runtime install vllm --variant cpu --home "$target"
python=$target/runtimes/vllm/bin/python
# The conversion needs more than the engine does.
"$python" -m pip install --quiet --no-deps --target "$work/more" accelerate==1.15.0 gguf==0.19.0
PYTHONPATH=$work/more "$python" - "$gguf" "$target/smollm2" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), sys.argv[2]
AutoModelForCausalLM.from_pretrained(
    source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
PYTHON
