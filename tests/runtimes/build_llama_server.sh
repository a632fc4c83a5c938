#!/usr/bin/env bash
# Builds llama-server and libllama.so from the llama.cpp tree inside the llama-cpp-python source distribution.
# Usage: build_llama_server.sh <target folder>; both end up in <target folder>/bin. Its variables: native_builds.py.
set -euo pipefail
target=$1
locks=$(realpath "$(dirname "$0")/../../runner_svc/environments/llama_server")
# Those of `weft runtime install`: what it compiled is taken from the cache.
common=(
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
  "-DCMAKE_C_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" "-DCMAKE_CXX_FLAGS=-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
)
# A named baseline instead of the processor that builds: the result is the same everywhere, and runs wherever it is
# carried to. The kernels for AMX of this version end with SIGSEGV at the first decode.
# SSE4.2 to BMI2 are named because their default is off where SOURCE_DATE_EPOCH is set.
processor=(
  -DGGML_NATIVE=OFF
  -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
  -DGGML_AVX_VNNI=OFF -DGGML_AVX512=OFF -DGGML_AVX512_VBMI=OFF -DGGML_AVX512_VNNI=OFF -DGGML_AVX512_BF16=OFF
  -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF
)
work=$target/work
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --require-hashes --no-deps --requirement "$locks/tools.lock"
"$work/tools/bin/pip" download --quiet --no-deps --no-binary :all: --no-build-isolation --require-hashes \
  --dest "$work" --requirement "$locks/source.lock"
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
# Folders beside each other as the installation has them: the cache compares relative paths.
mv "$work"/llama_cpp_python-*/vendor/llama.cpp "$work/source"
"$work/tools/bin/cmake" -S "$work/source" -B "$work/build" -G Ninja \
  "-DCMAKE_MAKE_PROGRAM=$work/tools/bin/ninja" "${common[@]}" "${processor[@]}"
"$work/tools/bin/ninja" -C "$work/build" -j"$(nproc)" llama-server libllama
rm -rf "$target/bin"
cp -r "$work/build/bin" "$target/"
