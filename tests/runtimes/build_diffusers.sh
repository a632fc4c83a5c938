#!/usr/bin/env bash
# Installs diffusers for processors as a user does, and makes pipelines of random weights.
# Usage: build_diffusers.sh <program weft> <target home>; the pipelines end up in its folder pipelines.
set -euo pipefail
weft=$1
target=$2
"$weft" runtime install diffusers --variant cpu --home "$target"
"$target/runtimes/diffusers/bin/python" "$(dirname "$0")/make_tiny_pipelines.py" "$target/pipelines"
