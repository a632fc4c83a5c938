"""Whatever field of a message a service refuses: a command names the option or argument that was typed."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.home_gateway import home_gateway
from kit.refusing_services import RefusingServices, refusing_services
from typer.testing import CliRunner

from weft_app.cli.main import COMMANDS, app

COMMAND_LINES = """
load zz-m --ctx 8192 --evict zz-e --request-id zz-id
load hf:zz/zz-b --name zz-n --runner zz-r
load zz-m --replicas 7
load zz-m --set batch_tokens=7
unload zz-m
flush --tag zz-tag --tenant zz-t
flush --model zz-m --runner zz-r
pull hf:zz/zz-b --runner zz-r
attach http://zz.lan:11434 --name zz-n --runner zz-r
detach zz-n
keys create --tenant zz-t --description zz-d
keys revoke zz-id
runner token create --description zz-d --address zz.lan:7
runner token revoke zz-id
lease release zz-l
usage --tenant zz-t --model zz-m
get requests zz-q
get tasks --caller zz-c
get models zz-m
describe runner zz-r
describe request zz-q
describe task zz-t
explain zz-q
delete agent zz-m
delete task zz-t
delete secret zz-s
cancel request zz-q
cancel task zz-t
cancel operation zz-o
wait task zz-t
events model zz-m --limit 7
profile save zz-p --description zz-d
profile switch zz-p
operation list --limit 7
operation watch zz-o
audit list --after 7
create secret zz-s --from-env HOME
create model zz-m --url https://zz.example/v1 --api-key-ref secret/zz-k
rotate secret zz-s --from-env HOME
edit agent zz-m
logs zz-m
logs task/zz-t
""".strip().splitlines()
OTHERS = frozenset(
    {
        *("up", "stop", "restart", "reload", "status", "health", "version", "demo", "ui", "doctor"),  # of this machine
        *("discover", "models", "estimate", "simulate", "runtime", "service", "serve", "edge", "launch"),
        *("sign", "approve"),  # of files
        *("apply", "diff"),  # of documents: test_cli_declare.py
        *("ps", "top", "figures"),  # they send nothing that was typed
        *("config", "conformance", "batch", "log-level"),  # they look names up themselves, or call HTTP
        *("chat", "run", "image", "transcribe", "speak"),  # of requests to models: test_cli_media.py, test_cli_chat.py
    }
)
_NAMED = re.compile(r"(?:^|: )(?P<name>--[a-z-]+(?: \w+)?|[A-Z][A-Z-]*): is refused")
"""An option, that of an engine's parameter with its name, or an argument."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RefusingServices, Path]]:
    with refusing_services() as (services, address):
        home = tmp_path_factory.mktemp("home")
        (home / "run").mkdir()
        (home / "run" / "up.json").write_text(json.dumps({"grpc": address}))
        with home_gateway(home, address):
            yield services, home


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_rejected_field_has_the_name_of_its_option_or_argument(
    line: str, services: tuple[RefusingServices, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing, home = services
    monkeypatch.setenv("WEFT_HOME", str(home))
    refusing.place, refusing.typed = 0, []
    while refusing.place == 0 or refusing.place < len(refusing.typed):
        said = CliRunner().invoke(app, shlex.split(line)).output
        assert refusing.typed, "no field was typed"
        found = _NAMED.search(said)
        assert found is not None, f"{refusing.typed[refusing.place]}: {said}"
        assert found["name"].partition(" ")[0] in line or not found["name"].startswith("--")
        refusing.place += 1


def test_every_command_is_covered_or_has_an_exemption() -> None:
    assert {line.split()[0] for line in COMMAND_LINES} == COMMANDS.keys() - OTHERS
    assert COMMANDS.keys() >= OTHERS
