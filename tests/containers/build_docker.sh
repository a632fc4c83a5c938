#!/usr/bin/env bash
# Unpacks Docker, Compose, and what they need from Debian's packages into a folder, and makes there what stands for images of
# others, for machines that reach Debian's packages and no registry of images. Usage: build_docker.sh FOLDER (as root)
# Docker, containerd and Compose are those of trixie, the first Debian with a Compose of today; they run on bookworm.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
mkdir -p "$1"/{packages,cache/archives/partial,lists/partial,config/cli-plugins}
folder=$(realpath "$1")
cd "$folder/packages"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$folder/trixie.list"
trixie=(-o "Dir::Etc::sourcelist=$folder/trixie.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$folder/lists"
  -o "Dir::Cache=$folder/cache")
apt-get update -qq
apt-get "${trixie[@]}" update -qq
apt-get "${trixie[@]}" download -qq docker.io docker-cli docker-compose containerd tini 2>/dev/null
apt-get download -qq runc iptables libip4tc2 libip6tc2 libxtables12 libnftnl11 libmnl0 libnetfilter-conntrack3 \
  libnfnetlink0 slirp4netns libslirp0 mmdebstrap 2>/dev/null
for package in *.deb; do dpkg -x "$package" "$folder/root"; done
ln -sf xtables-nft-multi "$folder/root/usr/sbin/iptables"
ln -sf xtables-nft-multi "$folder/root/usr/sbin/ip6tables"
ln -sf "$folder/root/usr/libexec/docker/cli-plugins/docker-compose" "$folder/config/cli-plugins/"

"$here/python_image.sh" "$folder/root/usr/bin/mmdebstrap" "$folder/python.tar"
perl "$folder/root/usr/bin/mmdebstrap" --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' \
  --include=postgresql-17,prometheus trixie "$folder/trixie.tar" http://deb.debian.org/debian
touch "$folder/done"
