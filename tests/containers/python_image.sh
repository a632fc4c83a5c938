#!/usr/bin/env bash
# Makes what stands for the image python:3.11-slim: a Debian with Python. Usage: python_image.sh MMDEBSTRAP TAR (as root)
set -euo pipefail
perl "$1" --quiet --variant=minbase --include=python3-venv,ca-certificates bookworm "$2"
