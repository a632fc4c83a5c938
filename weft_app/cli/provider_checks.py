"""The checks of central models by `weft doctor`: whether their providers can be reached, and their secrets exist.

A provider gets a connection and, for https, the handshake of TLS: no request, and never a key.
"""

import socket
import ssl
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from weft.documents.kinds.model import SECRET_PREFIX
from weft_app.cli.mesh_documents import Document

CONNECT_SECONDS = 3.0
"""Longest wait for the connection to one provider, and for its handshake."""
MAX_PROVIDERS = 64
"""Providers that are connected to; of more, the first by their addresses."""
_AT_ONCE = 8
_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralModelCheck:
    """What was found out about one central model."""

    model: str
    problem: str = ""
    """Empty: none."""
    remedy: str = ""


def check_central_models(models: Sequence[Document], secrets: Collection[str]) -> Iterator[CentralModelCheck]:
    """Yields a finding per model, each with a provider. `secrets`: the names of those that exist."""
    places = sorted({_place(model["provider"]["url"]) for model in models})[:MAX_PROVIDERS]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="providers") as pool:
        problems = dict(zip(places, pool.map(unreached_words, places), strict=True))
    for model in models:
        name, provider = model["name"], model["provider"]
        secret = provider.get("apiKeyRef", "").removeprefix(SECRET_PREFIX)
        if secret and secret not in secrets:
            problem, remedy = f"there is no secret/{secret}", f"weft create secret {secret} -"
            yield CentralModelCheck(model=name, problem=problem, remedy=remedy)
        elif problem := problems.get(_place(provider["url"]), ""):
            remedy = f"look at `provider.url`: weft get model {name} -o yaml"
            yield CentralModelCheck(model=name, problem=problem, remedy=remedy)
        else:
            yield CentralModelCheck(model=name)


def _place(url: str) -> tuple[str, int, bool]:
    """Returns the host and port of a URL, and whether it uses TLS."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443), parts.scheme != "http"


def unreached_words(place: tuple[str, int, bool]) -> str:
    """Returns why a provider cannot be reached, as text; empty: it can."""
    host, port, over_tls = place
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            if over_tls:
                with ssl.create_default_context().wrap_socket(connection, server_hostname=host):
                    pass
    except TimeoutError:
        return f"{host}:{port} does not answer within {CONNECT_SECONDS:g} s"
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {host}:{port} is refused: {error.verify_message}"
    except ssl.SSLError as error:
        return f"{host}:{port} does not speak TLS: {error.reason}"
    except OSError as error:
        return f"{host}:{port} cannot be reached: {error.strerror or error}"
    return ""
