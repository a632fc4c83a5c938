"""The settings and certificates of deploy/kubernetes in use: each service as a process with the host name of its pod.

A network and a mount namespace of the test's own stand for the cluster: no port is taken here, and the names of pods
lead to the loopback interface.
"""

import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import pytest
import yaml

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root makes namespaces"),
]

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
WEFT = Path(sys.executable).with_name("weft")
DOMAIN = "weft.svc.cluster.local"
CLUSTER = """
set -eu
ip link set lo up
mount --bind "$FOLDER/hosts" /etc/hosts
start() { # start ROLE HOST ARGUMENTS...
  role=$1 host=$2; shift 2
  unshare --uts sh -ec 'hostname "$0"; exec "$@"' "$host" "$WEFT" serve "$role" --home "$FOLDER/home-$role" \\
    --config "$FOLDER/$role.yaml" --metrics "unix:$FOLDER/$role.metrics" "$@" > "$FOLDER/$role.out" 2>&1 &
}
until_served() {
  for _ in $(seq 120); do grep -q 'serves at' "$FOLDER/$1.out" && return; sleep 0.5; done
  cat "$FOLDER/$1.out" >&2
  exit 1
}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
start registry weft-registry-0.weft-registry.$DOMAIN --listen 0.0.0.0:7070
until_served registry
start router weft-router-0.weft-router.$DOMAIN --listen 0.0.0.0:7071
until_served router
start runner weft-runner-0.weft-runner.$DOMAIN --listen 0.0.0.0:7072
start gateway weft-gateway-7c9d
until_served runner
until_served gateway
tls=$FOLDER/weft-tls-registry
export WEFT_CA_FILE=$tls/ca.crt WEFT_CERTIFICATE_FILE=$tls/tls.crt WEFT_KEY_FILE=$tls/tls.key
"$WEFT" mesh wait model/smollm2-135m --for ready --timeout 100s --home "$FOLDER/home-gateway" >&2
key=$("$WEFT" keys create -o name --home "$FOLDER/home-gateway")
export CA=$FOLDER/weft-tls-router/ca.crt ROUTER=weft-router-0.weft-router.$DOMAIN
"$WEFT" runner token create -o json --home "$FOLDER/home-gateway" --address "$ROUTER:7443" > "$FOLDER/token.json"
"$PYTHON" -c '
import json, os, socket, ssl, sys, urllib.request
context, place = ssl.create_default_context(cafile=os.environ["CA"]), os.environ["ROUTER"]
with socket.create_connection((place, 7443), 10) as plain, context.wrap_socket(plain, server_hostname=place):
    pass
token = json.load(open(os.environ["FOLDER"] + "/token.json"))["token"]
body = {"name": "ann-laptop", "models": [{"name": "ann-model"}]}
request = urllib.request.Request(f"https://{place}:7480/publisher/v1/register", json.dumps(body).encode())
request.add_header("authorization", "Bearer " + token)
print(urllib.request.urlopen(request, timeout=60, context=context).read().decode(), file=sys.stderr)
'
"$WEFT" mesh health --home "$FOLDER/home-registry" >&2
"$PYTHON" -c '
import json, sys, time, urllib.error, urllib.request
body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 5}
headers = {"content-type": "application/json", "authorization": "Bearer " + sys.argv[1]}
for _ in range(60):
    try:
        url = "http://localhost:8080/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        print(urllib.request.urlopen(request, timeout=60).read().decode())
        break
    except urllib.error.HTTPError as error:
        sys.stderr.write(error.read().decode())
        time.sleep(1)
' "$key"
env -u WEFT_CERTIFICATE_FILE -u WEFT_KEY_FILE "$WEFT" mesh health --home "$FOLDER/home-registry" >&2 && exit 9 || true
"""
"""Prints the answer to a chat; ends with 9 where a caller without a certificate is let in."""


def _make_pods(folder: Path) -> None:
    """What each pod has: its certificate, its settings, and a name that others resolve."""
    made = subprocess.run([str(FOLDER / "secrets.sh")], capture_output=True, text=True, check=True).stdout
    for secret in yaml.safe_load_all(made):
        mounted = folder / secret["metadata"]["name"]
        mounted.mkdir()
        for name, value in secret["data"].items():
            (mounted / name).write_bytes(b64decode(value))
            (mounted / name).chmod(0o440)
    names = ["localhost", *(f"weft-{role}-0.weft-{role}.{DOMAIN}" for role in ("registry", "router", "runner"))]
    (folder / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in names))
    text = (FOLDER / "base" / "weft.yaml").read_text("utf-8")
    for role in ("registry", "router", "gateway", "runner"):
        (folder / f"{role}.yaml").write_text(text.replace("/etc/weft-tls", str(folder / f"weft-tls-{role}")))


def test_services_named_like_pods_trust_each_other_and_no_other(tmp_path: Path) -> None:
    _make_pods(tmp_path)
    environment = {**os.environ, "FOLDER": str(tmp_path), "DOMAIN": DOMAIN, "WEFT": str(WEFT), "PYTHON": sys.executable}
    ended = subprocess.run(
        ["unshare", "--net", "--mount", "bash", "-c", CLUSTER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280.0,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4_000:]
    assert json.loads(ended.stdout)["choices"][0]["message"]["content"]
    assert "registry  ready" in ended.stderr
    assert "registry  no answer" in ended.stderr
