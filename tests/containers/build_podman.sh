#!/usr/bin/env bash
# Unpacks podman and runc from Debian's packages into a folder, and makes there what stands for the image python:3.11-slim,
# for machines that reach Debian's packages and no registry of images. Usage: build_podman.sh FOLDER (as root)
# crun, the usual runtime, fails where cgroups are of both versions ("hybrid mode not supported"); runc does not.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
mkdir -p "$1/packages" "$1/home/.config/containers"
folder=$(realpath "$1")
cd "$folder/packages"
apt-get update -qq
apt-get download -qq podman runc conmon golang-github-containers-common golang-github-containers-image libgpgme11 \
  libassuan0 libsubid4 mmdebstrap 2>/dev/null
for package in *.deb; do dpkg -x "$package" "$folder/root"; done

cp "$folder/root/etc/containers/policy.json" "$folder/home/.config/containers/"
cat >"$folder/storage.conf" <<CONF
[storage]
driver = "overlay"
runroot = "$folder/runroot"
graphroot = "$folder/storage"
CONF
cat >"$folder/containers.conf" <<CONF
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
conmon_path = ["$folder/root/usr/bin/conmon"]
[engine.runtimes]
runc = ["$folder/root/usr/sbin/runc"]
CONF
cat >"$folder/podman" <<SCRIPT
#!/bin/sh
export HOME="$folder/home" LD_LIBRARY_PATH="$folder/root/usr/lib/$(uname -m)-linux-gnu"
export CONTAINERS_CONF="$folder/containers.conf" CONTAINERS_STORAGE_CONF="$folder/storage.conf"
export PATH="$folder/root/usr/bin:$folder/root/usr/sbin:\$PATH"
exec "$folder/root/usr/bin/podman" "\$@"
SCRIPT
chmod +x "$folder/podman"

# A Debian with Python, under the name of the image that the Dockerfile names.
"$here/python_image.sh" "$folder/root/usr/bin/mmdebstrap" "$folder/python.tar"
"$folder/podman" import --quiet "$folder/python.tar" docker.io/library/python:3.11-slim
rm "$folder/python.tar"
touch "$folder/done"
