#!/usr/bin/env bash
# The secrets of the mesh, made anew, as documents for kubectl:
#
#   deploy/kubernetes/secrets.sh postgresql://weft:SECRET@db.example/weft | kubectl apply -f -
#
# An authority and a certificate of 397 days for each service; what registries must have in common; and, where it is named,
# the database. The authority's key is not kept: all certificates are replaced together, by the same command, and only they:
#
#   deploy/kubernetes/secrets.sh | kubectl apply -f - -l weft-secret=certificate
set -euo pipefail
namespace=weft domain=${CLUSTER_DOMAIN:-cluster.local} most=5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
openssl req -x509 "${key[@]}" -days 3650 -subj "/CN=weft mesh" -keyout ca.key -out ca.crt 2>/dev/null

secret() { # secret NAME LABEL KEY=FILE...: one document
  printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: %s, namespace: %s, labels: {weft-secret: %s}}\ndata:\n' "$1" "$namespace" "$2"
  for file in "${@:3}"; do printf '  %s: %s\n' "${file%%=*}" "$(base64 -w 0 "${file#*=}")"; done
}

for role in registry router gateway runner; do
  names="URI:weft://mesh/$role,DNS:weft-$role.$namespace.svc.$domain"
  for ((number = 0; number < most; number++)); do
    names+=",DNS:weft-$role-$number.weft-$role.$namespace.svc.$domain"
  done
  openssl req "${key[@]}" -subj "/CN=weft $role" -keyout "$role.key" -out "$role.csr" 2>/dev/null
  openssl x509 -req -in "$role.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 397 -out "$role.crt" \
    -extfile <(echo "subjectAltName=$names") 2>/dev/null
  secret "weft-tls-$role" certificate "tls.crt=$role.crt" "tls.key=$role.key" ca.crt=ca.crt
done

head -c 32 /dev/urandom >key-pepper
head -c 32 /dev/urandom >results.key
openssl rand -base64 32 >secret-keys
secret weft-keys keys key-pepper=key-pepper secret-keys=secret-keys results.key=results.key

if [ $# -gt 0 ]; then
  printf '{"registry": {"database_url": "%s"}, "router": {"database_url": "%s"}}\n' "$1" "$1" >weft.local.yaml
  secret weft-database database weft.local.yaml=weft.local.yaml
fi
