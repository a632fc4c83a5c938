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

from weft_app.cli.commands import COMMANDS, GROUPS
from weft_app.cli.extension_commands import extension_commands
from weft_app.cli.main import app

COMMAND_LINES = """
load zz-m --ctx 8192 --evict zz-e --request-id zz-id
load hf:zz/zz-b --name zz-n --runner zz-r
load zz-m --replicas 7
load zz-m --set batch_tokens=7
unload zz-m
models tune zz-m
models trial start zz-m --against zz-a --tenant zz-t
models trial switch zz-t
models trial revert zz-t
models flush --tag zz-tag --tenant zz-t
models flush --model zz-m --runner zz-r
pull hf:zz/zz-b --runner zz-r
models attach http://zz.lan:11434 --name zz-n --runner zz-r
models detach zz-n
keys create --tenant zz-t --description zz-d
keys revoke zz-id
runner token create --description zz-d --address zz.lan:7
runner token revoke zz-id
mesh lease release zz-l
mesh usage --tenant zz-t --model zz-m
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
mesh wait task zz-t
events model zz-m --limit 7
mesh operation list --limit 7
mesh operation watch zz-o
mesh audit list --after 7
keys secret create zz-s --from-env HOME
models create zz-m --url https://zz.example/v1 --api-key-ref secret/zz-k
keys secret rotate zz-s --from-env HOME
config edit agent zz-m
logs zz-m
logs task/zz-t
""".strip().splitlines()
OTHERS = frozenset(
    {
        *("up", "stop", "mesh restart", "mesh reload", "status", "ui", "doctor"),  # of this machine
        *("mesh health", "mesh version", "mesh demo", "mesh service", "mesh simulate"),
        *("models discover", "models estimate", "runtime", "serve", "config envoy", "launch"),
        *("keys sign", "models ls", "models rm", "models gc", "mesh dump", "mesh restore"),  # of files
        *("apply", "config diff"),  # of documents: test_cli_declare.py
        *("ps", "top", "mesh figures"),  # they send nothing that was typed
        *("runner conformance", "batch"),  # they look names up themselves, or call HTTP
        *("chat", "run", "models quote"),  # of requests to models: test_cli_chat.py
        *("media", "media image", "media transcribe", "media speak"),  # test_cli_media.py
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
    paths = {" ".join(line.split()[:2]) for line in COMMAND_LINES}
    known = COMMANDS.keys() | extension_commands().keys()
    covered = {path if path in known else path.split()[0] for path in paths}
    assert covered == known - OTHERS - (GROUPS.keys() - covered)
    assert known >= OTHERS
