"""The output of `weft up` once its mesh is up: addresses, lines to copy, and secrets of a first start.

A first start beyond loopback creates an admin key, and an invitation for runners.
"""

import asyncio
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft_app.cli.completion import KEYS
from weft_app.cli.join_tokens import JOIN_TOKENS, join_command
from weft_app.cli.keys import KeyRole, scopes_of
from weft_app.cli.mesh_api import MeshApi, SocketConnection, api_socket
from weft_app.cli.output import moment_in
from weft_app.cli.stages import STOP_LINE
from weft_app.cli.terminal import note
from weft_app.cli.ui import PAGE
from weft_app.compose.home import WeftHome
from weft_app.config.config import CONFIG_NAME

if TYPE_CHECKING:
    from weft_app.compose.mdns_announcer import AnnouncementState
    from weft_app.compose.up import UpHost


TIMEOUT_SECONDS = 5.0
SECONDS_OF_DAY = 86_400
INVITATION_DAYS = 30
"""Lifetime of the first invitation. After that, runners that joined with it need a new one to dial again."""
KEY_FILE = "first-admin-key"
JOIN_FILE = "first-invitation"
DESCRIPTION = "created at the first start of weft up"
MAX_NETWORK_URLS = 3
CA_NAME = "weft-ca.pem"
_INDENT = " " * 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAccess:
    """Secrets of a first start; empty if they existed already or are not needed."""

    key: str = ""
    """The admin key, if it is shown on a terminal."""
    key_file: Path | None = None
    """The file with the key otherwise, since other output may be a log that others can read."""
    join_command: str = ""
    join_file: Path | None = None


async def first_access(host: "UpHost", home: WeftHome, *, is_terminal: bool) -> FirstAccess:
    """Creates an admin key if callers need keys and there is none, and an invitation if runners may join.

    If the registry rejects this, both stay empty and the text contains the commands.
    """
    key = invitation = ""
    socket = api_socket(Path(home.root))
    if not host.network_urls or socket is None:
        return FirstAccess()
    # Without the environment's key, which is for another mesh.
    with MeshApi(SocketConnection(socket, TIMEOUT_SECONDS), str(socket), key="") as api:
        try:
            if host.asks_for_keys:
                key = await asyncio.to_thread(_first_key, api)
            if host.relay is not None and host.relay.url.startswith("https://"):
                token = await asyncio.to_thread(_first_token, api)
                invitation = join_command(home.root, token)[0] if token else ""
        except WeftError as error:
            note(f"the first key could not be created: {error.message}")
    if is_terminal:
        return FirstAccess(key=key, join_command=invitation)
    return FirstAccess(key_file=_kept(home.root / KEY_FILE, key), join_file=_kept(home.root / JOIN_FILE, invitation))


def _first_key(api: MeshApi) -> str:
    """Returns a new admin key; empty if a valid key exists."""
    if any(key["state"] == "good" for key in api.get(KEYS)["items"]):
        return ""
    return str(api.post(KEYS, {"description": DESCRIPTION, "scopes": list(scopes_of(KeyRole.ADMIN))})["key"])


def _first_token(api: MeshApi) -> str:
    """Returns a new join token; empty if a valid one exists."""
    ends = [token.get("expireTime") for token in api.get(JOIN_TOKENS)["items"] if token["type"] == "token"]
    if not all(end and moment_in(end) <= datetime.now(UTC) for end in ends):
        return ""
    wanted = {"description": DESCRIPTION, "lifetimeSeconds": INVITATION_DAYS * SECONDS_OF_DAY}
    return str(api.post(JOIN_TOKENS, wanted)["token"])


def _kept(file: Path, text: str) -> Path | None:
    """Writes a secret to a file that only its owner can read, and returns the file. None for empty text."""
    if not text:
        return None
    try:
        replace_file(file, f"{text}\n".encode())
    except OSError as error:
        raise WeftError(Reason.INVALID_ARGUMENT, f"{file} cannot be written: {error.strerror}") from error
    return file


def ready_text(host: "UpHost", home: WeftHome, access: FirstAccess) -> str:
    """Returns the addresses and commands for a user."""
    notices = "".join(f"\n  WARNING   {notice}\n" for notice in host.notices)
    warning = (
        "\n  WARNING   plain HTTP (--insecure): anyone on the network can read and change keys, prompts\n"
        f"{_INDENT}and answers. Leave --insecure out for HTTPS.\n"
        if host.is_insecure
        else ""
    )
    facts = "".join(_facts(host, home, access))
    tries = "".join(_tries(host))
    return f"\n  weft is up\n\n{facts}{notices}{warning}\n{tries}{STOP_LINE}\n"


class KeptAccess:
    """Restores secrets that a background start stored in files to its output on a terminal."""

    def __init__(self, home: WeftHome) -> None:
        self._kept = FirstAccess(key_file=home.root / KEY_FILE, join_file=home.root / JOIN_FILE)
        self._shown: list[Path] = []

    def on_terminal(self, line: str) -> str:
        """Returns a line as a start on a terminal shows it; unchanged if no file can be read."""
        kept = self._kept
        if kept.key_file is not None and (secret := self._secret_in(line, kept.key_file)):
            shown = replace(kept, key=secret, key_file=None)
            line = line.replace(_joined(*_key_lines(kept)), _joined(*_key_lines(shown)))
        if kept.join_file is not None and (secret := self._secret_in(line, kept.join_file)):
            shown = replace(kept, join_command=secret, join_file=None)
            line = line.replace(_joined(*_join_lines("", kept)), _joined(*_join_lines("", shown)))
        return line

    def remove_shown(self) -> None:
        """Removes the files of shown secrets, as secrets are shown only once."""
        for file in self._shown:
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _secret_in(self, line: str, file: Path) -> str:
        if str(file) not in line:
            return ""
        with suppress(OSError, UnicodeDecodeError):
            secret = file.read_text().strip()
            self._shown.append(file)
            return secret
        return ""


def config_words(files: Sequence[Path]) -> str:
    """Returns the files of a configuration as text."""
    if not files:
        return f"none: there is no {CONFIG_NAME} in {Path.cwd()}"
    return ", ".join(map(str, files))


def _facts(host: "UpHost", home: WeftHome, access: FirstAccess) -> Iterator[str]:
    yield _fact("base URL", f"{host.url}/v1")
    if host.network_urls:
        yield _fact("network", *(f"{url}/v1" for url in host.network_urls[:MAX_NETWORK_URLS]))
    if host.has_workbench:
        yield _fact("workbench", f"{host.url}{PAGE}")
    if host.certificate is not None:
        yield _fact(
            "TLS",
            f"own certificate; clients trust {host.certificate.authority_file}",
            host.certificate.fingerprint,
        )
    yield _fact("config", config_words(host.config_files))
    yield _fact("gRPC", *filter(None, (host.grpc_port_address, host.grpc_address)))
    if host.asks_for_keys:
        yield _fact("keys", *_key_lines(access))
    if host.relay is not None:
        yield _fact("runners", *_join_lines(host.relay.url, access))
    yield from (_fact(label, line) for label, line in host.joins)
    if host.announcement is not None:
        yield _fact("announced", *_announcement_lines(host.announcement))
    yield _fact("logs", str(home.logs))


def _key_lines(access: FirstAccess) -> Iterator[str]:
    if access.key:
        yield "callers need one. The first, with the role admin, is shown only now:"
        yield access.key
    elif access.key_file is not None:
        yield f"callers need one. The first, with the role admin, is in {access.key_file}"
    else:
        yield "callers need one: weft keys create"


def _join_lines(url: str, access: FirstAccess) -> Iterator[str]:
    if access.join_command:
        yield f"join another machine with this command, shown only now, valid for {INVITATION_DAYS} days:"
        yield access.join_command
    elif access.join_file is not None:
        yield f"join another machine with the command in {access.join_file}, valid for {INVITATION_DAYS} days"
    else:
        yield f"join at {url}; create the command with: weft runner token create"


def _announcement_lines(state: "AnnouncementState") -> Iterator[str]:
    if state.why_not:
        yield f"not now: {state.why_not}"
        return
    yield f"as {state.name} on this network: weft runner join finds it and asks for an invitation or a token"
    if state.fingerprint:
        yield f"and for this fingerprint: {state.fingerprint}"


def _tries(host: "UpHost") -> Iterator[str]:
    model, command = host.example_model
    trust = f" --cacert {shlex.quote(str(host.certificate.authority_file))}" if host.certificate is not None else ""
    key = ' -H "Authorization: Bearer $WEFT_API_KEY"' if host.asks_for_keys else ""
    given = "    export WEFT_API_KEY=$(weft keys create --role user -o name)\n" if host.asks_for_keys else ""
    if command:
        yield f"  try it:\n\n{given}    {command} --model {model}\n\n"
    else:
        yield (
            f"  try it:\n\n{given}"
            f"    curl{trust} {host.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
            f'      -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello"}}]}}\'\n\n'
        )
    if host.network_urls:
        yield f"  from another machine:\n\n{''.join(_elsewhere(host))}\n"


def _elsewhere(host: "UpHost") -> Iterator[str]:
    url = host.network_urls[0]
    trust, own = "", host.certificate
    yield "    weft keys create --role user             # on this machine: prints the key\n"
    if own is not None:
        trust = f" --cacert {CA_NAME}"
        yield f"    curl -sk {url}/ca.pem -o {CA_NAME}\n"
        yield f"    openssl x509 -in {CA_NAME} -outform der | sha256sum   # must be {own.fingerprint[7:]}\n"
        yield f"    export SSL_CERT_FILE=$PWD/{CA_NAME}\n"
    yield f"    export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=weft_...\n"
    yield f'    curl{trust} $OPENAI_BASE_URL/models -H "Authorization: Bearer $OPENAI_API_KEY"\n'


def _fact(name: str, *lines: str) -> str:
    return f"  {name:<10}{_joined(*lines)}\n"


def _joined(*lines: str) -> str:
    return f"\n{_INDENT}".join(lines)
