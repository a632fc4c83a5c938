#!/usr/bin/env bash
# Installs mlx-lm with MLX's processor kernels into an environment of its own, and converts the demo model for it.
# Usage: build_mlx_lm.sh <GGUF file of the demo model> <target environment>; the model ends up in its folder smollm2.
set -euo pipefail
gguf=$1
target=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv --clear "$target"
"$target/bin/pip" install --quiet mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
# The conversion needs torch, which the engine does not.
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 gguf
"$work/venv/bin/python" - "$gguf" "$target/smollm2" <<'PYTHON'
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, target = Path(sys.argv[1]), sys.argv[2]
AutoModelForCausalLM.from_pretrained(
    source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float16
).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
PYTHON
"$target/bin/python" -c "import mlx.core, mlx_lm.server"
