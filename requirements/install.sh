#!/usr/bin/env bash
# Installs a lock file with progress: a bar on a terminal, nothing otherwise; pip's own words only when it fails.
# Usage: requirements/install.sh <python> <lock file> [pip options]
set -euo pipefail
python=$1 lock=$2
shift 2
total=$(grep -cE '^[a-zA-Z0-9].*==' "$lock")
log=$(mktemp)
trap 'rm -f "$log"' EXIT

show() { # show <done> <package>
  [ -t 1 ] || return 0
  local width=30 filled=$(($1 * 30 / total))
  printf '\r      [%s%s] %d/%d %-32.32s' "$(printf '%*s' "$filled" '' | tr ' ' '#')" \
    "$(printf '%*s' "$((width - filled))" '' | tr ' ' '.')" "$1" "$total" "$2"
}

count=0
if ! "$python" -m pip --disable-pip-version-check install --no-input --progress-bar off --require-hashes "$@" -r "$lock" \
  2>&1 | tee "$log" | while IFS= read -r line; do
    case $line in
      Collecting* | Requirement\ already*) count=$((count + 1)) && show "$((count > total ? total : count))" "$(cut -d' ' -f2 <<<"${line#Requirement already }")" ;;
      Installing\ collected*) show "$total" "installing" ;;
    esac
  done; then
  [ -t 1 ] && echo
  grep -v '^WARNING' "$log" | tail -n 20 | cut -c1-300 >&2
  echo "the installation failed; its last words are above. Is the network there? Then run make again." >&2
  exit 1
fi
if [ -t 1 ]; then printf '\r%*s\r' 90 ''; fi
