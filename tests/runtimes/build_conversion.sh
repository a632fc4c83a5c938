#!/usr/bin/env bash
# Makes an environment that converts weights: transformers and torch, and the converters of llama.cpp and CTranslate2.
# Usage: build_conversion.sh <target environment>; llama.cpp's converter ends up in <target environment>/llama.cpp.
set -euo pipefail
target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv --clear "$target"
"$target/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 sentencepiece==0.2.3 gguf==0.19.0 \
  ctranslate2==4.8.5
# The converter of the release that the tests' llama-server is built from.
"$target/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$work" llama-cpp-python==0.3.36
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
mkdir "$target/llama.cpp"
cp -r "$work"/llama_cpp_python-*/vendor/llama.cpp/{convert_hf_to_gguf.py,conversion,gguf-py} "$target/llama.cpp/"
PYTHONPATH="$target/llama.cpp/gguf-py" "$target/bin/python" -c "import ctranslate2, gguf, torch, transformers"
