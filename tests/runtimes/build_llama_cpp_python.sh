#!/usr/bin/env bash
# Installs llama-cpp-python into an environment of its own, over the libraries that build_llama_server.sh has built.
# Usage: build_llama_cpp_python.sh <folder with bin of that build> <target environment>
set -euo pipefail
libraries=$1/bin
target=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$work" llama-cpp-python==0.3.36
python3 -m venv --clear "$target"
# Nothing is compiled for a processor here: the kernels are those of the libraries.
LLAMA_CPP_LIB_PATH="$libraries" CMAKE_ARGS="-DLLAMA_BUILD=OFF -DGGML_NATIVE=OFF" \
  "$target/bin/pip" install --quiet "$work"/llama_cpp_python-*.tar.gz "msgspec>=0.19"
LLAMA_CPP_LIB_PATH="$libraries" "$target/bin/python" -c "import llama_cpp"
