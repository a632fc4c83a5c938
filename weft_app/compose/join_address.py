"""The address of a relay to join, and the verification of its certificate."""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from runner_svc.dial_out import speaks_no_grpc
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.link.link import LINK_CHANNEL_OPTIONS
from weft_app.compose.certificate import fingerprint_of
from weft_app.compose.grpc_host import is_loopback

FETCH_SECONDS = 10.0
MAX_URL_CHARS = 2048
_PORTS = {"http": 80, "https": 443}
_PLAIN_REASONS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
"""OpenSSL's reasons for an answer without TLS."""
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAddress:
    """A relay's address from its URL."""

    host: str
    port: int
    is_tls: bool

    @property
    def target(self) -> str:
        """The gRPC target."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


FindAddresses = Callable[[], Awaitable[Sequence[JoinAddress]]]
"""Returns the relay's possible current addresses, such as the announced ones. May raise WeftError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How to verify a relay's certificate. Without either field the system's roots are used."""

    ca: bytes | None = None
    """PEM roots."""
    fingerprint: str = ""
    """Fingerprint of the relay's certificate, as `sha256:<hex>`."""


def parse_join_address(url: str) -> JoinAddress:
    """Parses a URL such as https://mesh.example:7443. Raises INVALID_ARGUMENT."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise invalid_field("URL", "is not an address, which looks like https://mesh.example:7443") from None
    if len(url) > MAX_URL_CHARS or parts.scheme not in _PORTS or not parts.hostname:
        raise invalid_field("URL", "must look like https://mesh.example:7443")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise invalid_field("URL", "must be scheme, host and port, and nothing else")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise invalid_field("URL", "must begin with https:// except for this machine, because the token is secret")
    return JoinAddress(host=parts.hostname, port=port or _PORTS[parts.scheme], is_tls=parts.scheme == "https")


def parse_trust(address: JoinAddress, ca_file: Path | None, fingerprint: str | None) -> Trust:
    """Parses the trust options. Raises INVALID_ARGUMENT for invalid or conflicting options."""
    if ca_file is not None and fingerprint is not None:
        raise invalid_field("--fingerprint", "and --ca-file exclude each other")
    if not address.is_tls and (ca_file or fingerprint):
        raise invalid_field("--fingerprint", "and --ca-file are for https:// only")
    if ca_file is not None:
        return Trust(ca=_read_roots(ca_file.expanduser()))
    return Trust() if fingerprint is None else Trust(fingerprint=parse_fingerprint(fingerprint, "--fingerprint"))


def parse_fingerprint(text: str, option: str) -> str:
    """Normalizes a fingerprint to the form of `fingerprint_of`. Raises INVALID_ARGUMENT naming the option."""
    wanted = text.lower().replace("sha256:", "").replace(":", "")
    if _FINGERPRINT.fullmatch(f"sha256:{wanted}") is None:
        raise invalid_field(option, "must be sha256: and 64 hex digits, as `weft runner token create` shows it")
    return f"sha256:{wanted}"


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

    Raises CONNECT_FAILED if its certificate cannot be fetched, PERMISSION_DENIED if the fingerprint does not match.
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


class JoinDialer:
    """Opens the channel of each dial at the first address with a relay. Each address gets FETCH_SECONDS.

    If a channel does not result in a link, the next dial starts with the following address: only the link shows whether
    the relay accepts it and, without a fingerprint, whether there is a relay.
    """

    def __init__(
        self,
        addresses: Sequence[JoinAddress],
        trust: Trust,
        find: FindAddresses | None = None,
    ) -> None:
        """`find` returns further addresses to try if there is no relay at the known ones."""
        self._addresses = tuple(addresses)
        self._trust = trust
        self._find = find
        self._first = 0

    async def open(self) -> grpc.aio.Channel:
        """Returns a channel. Raises an error with the reason of each address.

        It is PERMISSION_DENIED if all show other certificates, else CONNECT_FAILED: on another network the same address
        may belong to another machine.
        """
        try:
            return await self._open_first((*self._addresses[self._first :], *self._addresses[: self._first]))
        except WeftError:
            if self._find is None:
                raise
            with suppress(WeftError):
                if others := [each for each in await self._find() if each not in self._addresses]:
                    return await self._open_first(others)
            raise

    def note_linked(self) -> None:
        """Records that the last channel resulted in a link: the next dial starts with the first address."""
        self._first = 0

    async def _open_first(self, addresses: Sequence[JoinAddress]) -> grpc.aio.Channel:
        failures: list[WeftError] = []
        for address in addresses:
            try:
                channel = await open_join_channel(address, self._trust)
            except WeftError as failure:
                failures.append(failure)
            else:
                if address in self._addresses:
                    self._first = (self._addresses.index(address) + 1) % len(self._addresses)
                return channel
        raise _no_relay(failures)


def _no_relay(failures: Sequence[WeftError]) -> WeftError:
    assert failures, "an invitation names an address"
    denied = all(failure.reason is Reason.PERMISSION_DENIED for failure in failures)
    reason = Reason.PERMISSION_DENIED if denied else Reason.CONNECT_FAILED
    return WeftError(reason, "; ".join(dict.fromkeys(failure.message for failure in failures)))


def _fetch_pinned(address: JoinAddress, fingerprint: str) -> tuple[bytes, str]:
    """Returns the relay's certificate (PEM) if its fingerprint matches, and the name to verify; empty: the host."""
    der, _ = _peer_certificate(address, _context())
    if fingerprint_of(der) != fingerprint:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            f"{address.target} showed another certificate than the one with this fingerprint; "
            "do not join there before its operator has told you why",
        )
    pem = ssl.DER_cert_to_PEM_cert(der)
    # Only a verified handshake reports the names of a certificate.
    _, names = _peer_certificate(address, _context(pem))
    return pem.encode(), "" if address.host in names or not names else names[0]


def _context(pem: str | None = None) -> ssl.SSLContext:
    """Returns a context to fetch a certificate, without sending data; with `pem`, exactly that one is required."""
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
    """Returns the server's certificate (DER), and its names if the context verifies it."""
    no_tls = f"{address.target} does not answer with TLS"
    try:
        plain = socket.create_connection((address.host, address.port), FETCH_SECONDS)
    except ConnectionResetError as error:
        # The connection was accepted, and reset before this process looked.
        raise WeftError(Reason.CONNECT_FAILED, no_tls) from error
    except (OSError, ValueError) as error:
        # ValueError: an invalid host name, such as one with a label of 64 characters.
        raise WeftError(Reason.CONNECT_FAILED, f"{address.target} cannot be reached") from error
    try:
        with plain, context.wrap_socket(plain, server_hostname=address.host) as secure:
            facts: dict[str, Any] = dict(secure.getpeercert() or {})
            names = [str(value) for _, value in facts.get("subjectAltName", ())]
            return secure.getpeercert(binary_form=True) or b"", names
    except ssl.SSLCertVerificationError as error:
        # The fingerprint matched, so only the dates can be invalid.
        raise WeftError(
            Reason.CONNECT_FAILED,
            f"the certificate of {address.target} is not valid now; check this machine's clock",
        ) from error
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason in _PLAIN_REASONS:
            raise speaks_no_grpc(address.target, "plain HTTP") from error
        raise WeftError(Reason.CONNECT_FAILED, no_tls) from error
