#!/usr/bin/env bash
# Builds llama-server from the llama.cpp tree inside the llama-cpp-python source distribution.
# Usage: build_llama_server.sh <target folder>; the binary and its libraries end up in <target folder>/bin.
set -euo pipefail
target=$1
# A named baseline instead of the processor that builds: the result is the same everywhere, and runs wherever it is
# carried to. The kernels for AMX of this version end with SIGSEGV at the first decode.
# SSE4.2 to BMI2 are named because their default is off where SOURCE_DATE_EPOCH is set.
processor=(
  -DGGML_NATIVE=OFF
  -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
  -DGGML_AVX_VNNI=OFF -DGGML_AVX512=OFF -DGGML_AVX512_VBMI=OFF -DGGML_AVX512_VNNI=OFF -DGGML_AVX512_BF16=OFF
  -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF
)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet cmake==4.1.2 ninja==1.13.0
"$work/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$work" llama-cpp-python==0.3.36
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
# All but the kernels is compiled with less effort: half of the time, and the same answers.
cat > "$work/less_effort.cmake" <<'CMAKE'
foreach(target llama llama-common mtmd server-context llama-server-impl llama-server)
  cmake_language(EVAL CODE "cmake_language(DEFER CALL target_compile_options ${target} PRIVATE -O1)")
endforeach()
CMAKE
# The prebuilt UI would be looked for on a hub.
"$work/venv/bin/cmake" -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" -G Ninja \
  -DCMAKE_MAKE_PROGRAM="$work/venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
  "${processor[@]}" "-DCMAKE_PROJECT_llama.cpp_INCLUDE=$work/less_effort.cmake" \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
  -DLLAMA_OPENSSL=OFF -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON
"$work/venv/bin/ninja" -C "$work/build" -j"$(nproc)" llama-server
rm -rf "$target/bin"
mkdir -p "$target"
cp -r "$work/build/bin" "$target/"
