"""`weft runner join`: an ordinary runner on a private socket, and the one outbound link that the mesh reaches it by.

Also the address of the relay that it joins, and the trust in that relay's certificate.
"""

import asyncio
import fcntl
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

import runner_svc.service
from runner_svc.dial_out import DialOut, DialOutConfig, LinkEvent
from runner_svc.runtimes.settings import ModelSettings
from runner_svc.runtimes.table import ATTACHED_RUNTIME
from runner_svc.settings import RunnerSettings
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.gc_tuning import settle_garbage_collector
from weft.kernel.reasons import Reason
from weft.link.link import LINK_CHANNEL_OPTIONS
from weft_app.compose.demo import configured_runners
from weft_app.compose.grpc_host import GrpcHost, is_loopback
from weft_app.compose.home import MAX_SOCKET_PATH_BYTES, WeftHome
from weft_app.compose.relay_certificate import fingerprint_of
from weft_app.compose.runner import pick_runner, runner_config
from weft_app.compose.shutdown import CriticalTasks, stop_requested
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.document import Document
from weft_app.config.loader import load_config

SOCKET_NAME = "runner.sock"
FETCH_SECONDS = 10.0
MAX_URL_CHARS = 2048
_PORTS = {"http": 80, "https": 443}
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAddress:
    """A relay as its URL names it."""

    host: str
    port: int
    is_tls: bool

    @property
    def target(self) -> str:
        """The relay as a gRPC target."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How a relay's certificate is verified. Neither field: by the system's roots."""

    ca: bytes | None = None
    """PEM roots."""
    fingerprint: str = ""
    """Fingerprint of the relay's own certificate, as `sha256:<hex>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """The runner and the mesh that it joins."""

    runner: RunnerSettings
    published: tuple[str, ...]
    """Its published models."""
    address: JoinAddress
    trust: Trust
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """An OpenAI-compatible server named on the command line instead of in a file."""

    runner: str
    url: str = field(repr=False)
    model: str
    upstream_model: str | None = None
    api_key_env: str | None = None
    remote: bool | None = None
    """Whether it is off the premises; None: not stated."""


def config_with_server(
    path: Path | None, server: ServerOptions, below: Callable[[Document], Document] | None = None
) -> WeftConfig:
    """Returns the configuration with that server as its only runner. Raises INVALID_ARGUMENT naming the field."""
    model: dict[str, Any] = {"name": server.model, "url": server.url, "publish": True}
    for name in ("upstream_model", "api_key_env", "remote"):
        if (value := getattr(server, name)) is not None:
            model[name] = value
    runner = {"name": server.runner, "runtime": ATTACHED_RUNTIME, "models": [model]}
    return load_config(path, {"runners": [runner]}, below)


def pick_published(
    config: WeftConfig, runner: str | None, opted_in: Collection[str]
) -> tuple[RunnerSettings, list[str]]:
    """Returns the runner that joins and its published models: those with `publish: true`, and those in `opted_in`.

    Raises INVALID_ARGUMENT, with the remedy, when none is published.
    """
    section = pick_runner(configured_runners(config), runner)
    names = {model.name for model in section.models}
    if unknown := sorted(set(opted_in) - names):
        raise invalid_field("--publish", f"{section.name} has no model {unknown[0]}; it has {', '.join(sorted(names))}")
    published = [model.name for model in section.models if model.publish is True or model.name in opted_in]
    if not published:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"no model of {section.name} is published; set `publish: true` of a model in {CONFIG_NAME}, "
            f"or add --publish {section.models[0].name}",
        )
    return section, published


async def join(plan: JoinPlan, config: WeftConfig, home: WeftHome, report: Callable[[LinkEvent], None]) -> None:
    """Joins until a signal arrives, then drains. Raises errors that no retry can mend, such as UNAUTHENTICATED."""
    stop = stop_requested()
    with private_folder(home, plan.runner.name) as folder:
        host = GrpcHost()
        address = host.bind(f"unix:{folder / SOCKET_NAME}")
        settings = runner_config(
            plan.runner,
            home,
            address=address,
            registry_address=address,
            published=partial(_is_published, plan.published),
            drain_seconds=config.drain_seconds,
            accelerators=config.accelerators,
            model_store=config.model_store,
        )
        # Its socket is private: the relay announces its own address instead.
        runner = runner_svc.service.build(replace(settings, address="", conceals_local_addresses=True))
        link = DialOutConfig(
            target=plan.address.target,
            open_channel=partial(open_join_channel, plan.address, plan.trust),
            token=plan.token,
            local_address=address,
        )
        dial_out = DialOut(link, report, note_fresh_link=runner.reopen_session, note_mesh_time=runner.note_mesh_time)
        with CriticalTasks(stop):
            try:
                await host.start([dial_out, runner])
                settle_garbage_collector()
                await _until_stopped(stop, dial_out)
            finally:
                await host.stop(config.drain_seconds)


@contextmanager
def private_folder(home: WeftHome, runner: str) -> Iterator[Path]:
    """Yields a private folder for the runner's socket. Raises ALREADY_EXISTS when the runner has joined already."""
    folder = home.run / f"join-{runner}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with (folder / "join.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WeftError(Reason.ALREADY_EXISTS, f"the runner {runner} of {home.root} is joined already") from error
        if len(os.fsencode(folder / SOCKET_NAME)) <= MAX_SOCKET_PATH_BYTES:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="weft-join-") as elsewhere:
            yield Path(elsewhere)


def _is_published(names: Collection[str], model: ModelSettings) -> bool:
    return model.name in names


async def _until_stopped(stop: asyncio.Event, dial_out: DialOut) -> None:
    stopping, giving_up = asyncio.create_task(stop.wait()), asyncio.create_task(dial_out.given_up())
    try:
        await asyncio.wait({stopping, giving_up}, return_when=asyncio.FIRST_COMPLETED)
        if giving_up.done():
            raise giving_up.result()
    finally:
        stopping.cancel()
        giving_up.cancel()


def parse_join_address(url: str) -> JoinAddress:
    """Returns the relay at a URL such as https://mesh.example:7443. Raises INVALID_ARGUMENT."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise invalid_field("URL", "is none; it looks like https://mesh.example:7443") from None
    if len(url) > MAX_URL_CHARS or parts.scheme not in _PORTS or not parts.hostname:
        raise invalid_field("URL", "must look like https://mesh.example:7443")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise invalid_field("URL", "must be scheme, host and port, and nothing else")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise invalid_field("URL", "must begin with https:// anywhere but on this machine: the token must stay secret")
    return JoinAddress(host=parts.hostname, port=port or _PORTS[parts.scheme], is_tls=parts.scheme == "https")


def parse_trust(address: JoinAddress, ca_file: Path | None, fingerprint: str | None) -> Trust:
    """Parses the trust options. Raises INVALID_ARGUMENT for options that conflict or are wrong."""
    if ca_file is not None and fingerprint is not None:
        raise invalid_field("--fingerprint", "and --ca-file exclude each other")
    if not address.is_tls and (ca_file or fingerprint):
        raise invalid_field("--fingerprint", "and --ca-file are for https:// only")
    if ca_file is not None:
        return Trust(ca=_read_roots(ca_file.expanduser()))
    if fingerprint is None:
        return Trust()
    wanted = fingerprint.lower().replace("sha256:", "").replace(":", "")
    if _FINGERPRINT.fullmatch(f"sha256:{wanted}") is None:
        raise invalid_field(
            "--fingerprint", "must be sha256: and 64 hex digits, as `weft runner token create` shows it"
        )
    return Trust(fingerprint=f"sha256:{wanted}")


def _read_roots(ca_file: Path) -> bytes:
    try:
        roots = ca_file.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=roots.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise invalid_field("--ca-file", f"{ca_file} holds no PEM certificates") from error
    except OSError as error:
        raise invalid_field("--ca-file", f"{ca_file} cannot be read: {error.strerror}") from error
    return roots


async def open_join_channel(address: JoinAddress, trust: Trust) -> grpc.aio.Channel:
    """Returns a channel to the relay.

    Raises CONNECT_FAILED when its certificate cannot be fetched, PERMISSION_DENIED when its fingerprint is another.
    """
    if not address.is_tls:
        return grpc.aio.insecure_channel(address.target, options=LINK_CHANNEL_OPTIONS)
    options: list[tuple[str, int | str]] = [*LINK_CHANNEL_OPTIONS]
    roots = trust.ca
    if trust.fingerprint:
        roots, name = await asyncio.to_thread(_fetch_pinned, address, trust.fingerprint)
        if name:
            options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address.target, grpc.ssl_channel_credentials(roots), options=options)


def _fetch_pinned(address: JoinAddress, fingerprint: str) -> tuple[bytes, str]:
    """Returns the relay's certificate (PEM) once its fingerprint matches, and the name to verify; empty: the host."""
    der, _ = _peer_certificate(address, _context())
    if fingerprint_of(der) != fingerprint:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            f"{address.target} showed another certificate than the one with this fingerprint; "
            "do not join there before its operator has told you why",
        )
    pem = ssl.DER_cert_to_PEM_cert(der)
    # Only a verified handshake gives the names of a certificate.
    _, names = _peer_certificate(address, _context(pem))
    return pem.encode(), "" if address.host in names or not names else names[0]


def _context(pem: str | None = None) -> ssl.SSLContext:
    """Returns a context to fetch a certificate; with `pem`, exactly that one is required. No data is sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    if pem is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=pem)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _peer_certificate(address: JoinAddress, context: ssl.SSLContext) -> tuple[bytes, list[str]]:
    """Returns the server's certificate (DER), and its names where the context has verified it."""
    try:
        with (
            socket.create_connection((address.host, address.port), FETCH_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as secure,
        ):
            facts: dict[str, Any] = dict(secure.getpeercert() or {})
            names = [str(value) for _, value in facts.get("subjectAltName", ())]
            return secure.getpeercert(binary_form=True) or b"", names
    except ssl.SSLCertVerificationError as error:
        # The fingerprint matched, so only its dates can be invalid.
        raise WeftError(
            Reason.CONNECT_FAILED,
            f"the certificate of {address.target} is not valid now; check this machine's clock",
        ) from error
    except ssl.SSLError as error:
        raise WeftError(Reason.CONNECT_FAILED, f"{address.target} does not answer with TLS") from error
    except (OSError, ValueError) as error:
        # ValueError: a host name that cannot be resolved, such as one with a label of 64 characters.
        raise WeftError(Reason.CONNECT_FAILED, f"{address.target} cannot be reached") from error
