#!/usr/bin/env bash
# Installs mlx-lm with MLX's processor kernels into an environment of its own, and converts the demo model for it.
# Usage: build_mlx_lm.sh <environment of build_conversion.sh> <GGUF file of the demo model> <target environment>;
# the model ends up in its folder smollm2.
set -euo pipefail
conversion=$1
gguf=$2
target=$3
python3 -m venv --clear "$target"
"$target/bin/pip" install --quiet mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
"$conversion/bin/python" "$(dirname "$0")/unpack_smollm2.py" "$gguf" "$target/smollm2" float16
"$target/bin/python" -c "import mlx.core, mlx_lm.server"
