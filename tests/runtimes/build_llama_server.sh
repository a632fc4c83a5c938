#!/usr/bin/env bash
# Builds llama-server from the llama.cpp tree inside the llama-cpp-python source distribution.
# Usage: build_llama_server.sh <target folder>; the binary and its libraries end up in <target folder>/bin.
set -euo pipefail
target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet cmake==4.1.2 ninja==1.13.0
"$work/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$work" llama-cpp-python==0.3.36
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
# The prebuilt UI would be looked for on a hub.
"$work/venv/bin/cmake" -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" -G Ninja \
  -DCMAKE_MAKE_PROGRAM="$work/venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
  -DLLAMA_OPENSSL=OFF -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON
"$work/venv/bin/ninja" -C "$work/build" -j"$(nproc)" llama-server
mkdir -p "$target"
cp -r "$work/build/bin" "$target/"
