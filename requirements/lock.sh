#!/usr/bin/env bash
# Resolves every lock file anew. Usage: requirements/lock.sh <folder with python> [environment of engines]
# With an environment, such as vllm, only its lock files. PYTORCH_CPU_INDEX names another copy of PyTorch's index.
set -euo pipefail
bin=$(realpath "$1") only=${2:-}
"$bin/python" -m pip --disable-pip-version-check install --quiet uv==0.13.8
export UV_CUSTOM_COMPILE_COMMAND="make lock"
lock() { "$bin/uv" pip compile --quiet --universal --generate-hashes --python-version 3.11 "$@"; }

if [ -z "$only" ]; then
  lock --no-emit-package weft pyproject.toml requirements/build.in -o requirements/up.lock
  lock --no-emit-package weft --group dev pyproject.toml requirements/build.in -o requirements/dev.lock
  lock -c requirements/dev.lock requirements/postgres.in -o requirements/postgres.lock
  lock requirements/protos.in -o requirements/protos.lock
  lock requirements/deploy.in -o requirements/deploy.lock
  lock requirements/dist.in -o requirements/dist.lock
  lock -c requirements/dev.lock requirements/workbench.in -o requirements/workbench.lock
  lock requirements/site.in -o requirements/site.lock
  lock --no-deps requirements/model.in -o requirements/model.lock
fi

# Environments of engines: for Linux on x86-64 alone, where their packages have wheels.
environments=$PWD/runner_svc/environments engines=$PWD/weft_extensions/engines/environments
pytorch=${PYTORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/pyproject.toml" <<'TOML'
[tool.uv]
environments = ["sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.14'"]
TOML

lock_engine() { # lock_engine <environment> <name of the lock> [uv options]
  local folder=$environments/$1
  [ -d "$folder" ] || folder=$engines/$1
  local from="$folder/$2.in" to="$folder/$2.lock"
  [ -z "$only" ] || [ "$only" = "$1" ] || return 0
  shift 2
  # Without the comments on who needs what, which would hold the paths of this machine.
  (cd "$work" && lock --no-annotate "$from" -o "$to" "$@")
}
# The tools of a build, for every system.
if [ -z "$only" ] || [ "$only" = llama_server ]; then
  lock --no-annotate "$environments/llama_server/tools.in" -o "$environments/llama_server/tools.lock"
  lock --no-annotate --no-deps "$environments/llama_server/source.in" -o "$environments/llama_server/source.lock"
fi
lock_engine llama_server cuda --no-deps
lock_engine ctranslate2 cpu
lock_engine ctranslate2 cuda
lock_engine diffusers cuda
lock_engine exllamav3 cuda
lock_engine speech cpu
lock_engine faster_whisper cpu
lock_engine faster_whisper cuda
lock_engine vllm cuda
lock_engine vllm cpu --override "$environments/vllm/cpu.overrides" --no-emit-package torch \
  --extra-index-url "$pytorch" --index-strategy unsafe-best-match
lock_engine diffusers cpu --no-emit-package torch --extra-index-url "$pytorch" --index-strategy unsafe-best-match
for engine in diffusers vllm; do
  lock_engine "$engine" cpu-torch --no-deps --extra-index-url "$pytorch" --index-strategy unsafe-best-match
  [ -z "$only" ] || [ "$only" = "$engine" ] || continue
  # pip reads the index from the lock; whoever has a mirror of it in pip's configuration needs no other.
  lock=$environments/$engine/cpu-torch.lock
  [ -f "$lock" ] || lock=$engines/$engine/cpu-torch.lock
  { grep '^#' "${lock%.lock}.in"; echo "--extra-index-url https://download.pytorch.org/whl/cpu"; cat "$lock"; } >"$work/lock"
  cp "$work/lock" "$lock"
done
