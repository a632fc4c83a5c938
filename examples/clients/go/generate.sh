#!/bin/sh
# Writes the packages weft/api/common/v1 and weft/api/router/v1 to build/src: ./generate.sh [folder of the protos]
set -eu
cd "$(dirname "$0")"
protos=${1:-../../../protos}
files=$(cd "$protos" && echo weft/api/common/v1/*.proto weft/api/router/v1/inference_service.proto)
packages=
for file in $files; do
  # The protos name no Go packages: each folder is one, with its own path as its import path.
  packages="$packages --go_opt=M$file=$(dirname "$file") --go-grpc_opt=M$file=$(dirname "$file")"
done
mkdir -p build/src
protoc -I "$protos" $packages --go_out=build/src --go-grpc_out=build/src $files
