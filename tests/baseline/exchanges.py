"""HTTP exchanges: requests that a YAML file describes, and their responses as text."""

import base64
import hashlib
import http.client
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from normal_form import NormalForm

TIMEOUT_SECONDS = 20.0
POLL_SECONDS = 0.1
UNSHOWN = frozenset({"date", "content-length", "connection", "transfer-encoding", "keep-alive", "server"})
OF_ALL = {("x-content-type-options", "nosniff"), ("cross-origin-resource-policy", "same-origin")}
"""Headers of every answer but those that any page may embed."""
MAX_TEXT_CHARS = 20_000
SOUND = b"RIFF\x24\0\0\0WAVEfmt " + bytes(20)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
CONTENTS: Mapping[str, bytes] = {"PIXEL": PIXEL, "SOUND": SOUND}
"""Contents of uploaded files by name; any other content is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request as its file describes it; README.md explains the fields."""

    name: str
    send: str
    json: Any = None
    text: str | None = None
    form: Mapping[str, Any] | None = None
    files: Mapping[str, list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    pad: int = 0
    keep: Mapping[str, str] = field(default_factory=dict)
    until: str = ""
    closes_at: str = ""
    shows: str = ""


def load_exchanges(path: Path) -> list[Exchange]:
    """Returns the exchanges of a file in their order, each with the file's defaults."""
    document = yaml.safe_load(path.read_text())
    described = document.pop("exchanges")
    return [_exchange(document, name, each) for key, entry in described.items() for name, each in _expanded(key, entry)]


def _expanded(name: str, entry: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields one entry for each item of its `each`: changes of the body, or a line to send."""
    entry = {"send": entry} if isinstance(entry, str) else dict(entry or {})
    for item in entry.pop("each", [None]):
        if item is None:
            yield name, entry
        elif isinstance(item, str):
            yield f"{name}: {item}", {**entry, "send": item}
        else:
            yield f"{name}: {json.dumps(item)[:100]}", {**entry, "with": {**entry.get("with", {}), **item}}


def _exchange(defaults: Mapping[str, Any], name: str, entry: dict[str, Any]) -> Exchange:
    changes, without = entry.pop("with", {}), entry.pop("without", ())
    other_body = {"text", "form", "json"} & entry.keys()
    given = {key: value for key, value in defaults.items() if key in {"send", "headers"} or not other_body}
    fields = {**given, **entry}
    if "send" in entry and not entry["send"].startswith(("POST", "PUT")):
        fields.pop("json", None)
    for body in ("json", "form"):
        if isinstance(fields.get(body), dict):
            whole = {**fields[body], **changes}
            fields[body] = {key: value for key, value in whole.items() if key not in without}
    return Exchange(name=name, **fields)


class HttpSession:
    """Sends exchanges to a gateway, in order; later ones may name what earlier responses had."""

    def __init__(self, url: str, places: Mapping[str, str], values: Mapping[str, str]) -> None:
        """`places`: as of NormalForm; `values`: what `${name}` in an exchange stands for, at the start."""
        self._address = urlsplit(url).netloc
        self._places = places
        self.values = dict(values)

    def record(self, exchange: Exchange) -> str:
        """Returns the response as text, once it has what the exchange waits for."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        method, _, path = self._filled(exchange.send).partition(" ")
        while True:
            status, headers, body = self._send(exchange, method, path)
            if exchange.until in body.decode(errors="replace") or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        self._keep(exchange, headers, body)
        return self._shown(exchange, f"{method} {path}", status, headers, body)

    def fetch(self, path: str) -> str:
        """Returns the body of a GET."""
        _, _, body = self._send(Exchange(name=path, send=f"GET {path}"), "GET", path)
        return body.decode()

    def _filled(self, text: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: self.values.get(found[1], found[0]), text)

    def _send(self, exchange: Exchange, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        body, media_type = self._body(exchange)
        headers = {"Content-Type": media_type} if media_type else {}
        headers |= {name: self._filled(value) for name, value in exchange.headers.items()}
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, body, {name: value for name, value in headers.items() if value})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, _read(response, exchange.closes_at)
        finally:
            connection.close()

    def _body(self, exchange: Exchange) -> tuple[bytes | None, str]:
        if exchange.text is not None:
            return self._filled(exchange.text).encode(), "application/json"
        if exchange.form is not None:
            return self._form(exchange)
        if exchange.json is None:
            return None, ""
        document = {**exchange.json, "pad": "x" * exchange.pad} if exchange.pad else exchange.json
        return self._filled(json.dumps(document)).encode(), "application/json"

    def _form(self, exchange: Exchange) -> tuple[bytes, str]:
        boundary = uuid.uuid4().hex
        parts: list[bytes] = []
        for name, value in (exchange.form or {}).items():
            parts.append(f'Content-Disposition: form-data; name="{name}"\r\n\r\n{self._filled(str(value))}'.encode())
        for name, (filename, media_type, content) in exchange.files.items():
            head = f'Content-Disposition: form-data; name="{name}"; filename="{filename}"\r\nContent-Type: {media_type}'
            data = CONTENTS.get(content, self._filled(content).encode())
            parts.append(head.encode() + b"\r\n\r\n" + data)
        whole = b"".join(f"--{boundary}\r\n".encode() + part + b"\r\n" for part in parts)
        return whole + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"

    def _keep(self, exchange: Exchange, headers: Mapping[str, str], body: bytes) -> None:
        """Keeps values for later exchanges: of a header, a path of the JSON, or what a pattern's group finds."""
        for name, place in exchange.keep.items():
            if place.startswith("header "):
                self.values[name] = headers.get(place.removeprefix("header "), "")
            elif "(" in place:
                found = re.search(place, body.decode(errors="replace"))
                self.values[name] = found[1] if found else "absent"
            else:
                value = json.loads(body)
                for step in place.split("."):
                    value = value[int(step)] if step.isdecimal() else value.get(step, {})
                self.values[name] = str(value)

    def _shown(self, exchange: Exchange, sent: str, status: int, headers: Mapping[str, str], body: bytes) -> str:
        form = NormalForm(self._places)
        shown = [f"> {form.text(sent)}", f"< {status}"]
        shown += [
            f"< {name}: {form.member(name.replace('-', '_'), value)}"
            for name, value in sorted(headers.items())
            if name not in UNSHOWN and (name, value) not in OF_ALL
        ]
        return "\n".join((*shown, _body_text(form, exchange.shows, headers.get("content-type", ""), body)))


def _read(response: http.client.HTTPResponse, closes_at: str) -> bytes:
    """Reads a response to its end, or to the end of the event that has a text."""
    if not closes_at:
        try:
            return response.read()
        except http.client.IncompleteRead as cut:
            return cut.partial + b"\n(the connection was cut)\n"
    lines: list[bytes] = []
    has_seen = False
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline and (line := response.readline()):
        lines.append(line)
        has_seen = has_seen or closes_at in line.decode(errors="replace")
        if has_seen and not line.strip():
            break
    return b"".join(lines)


def _body_text(form: NormalForm, shows: str, media_type: str, body: bytes) -> str:
    kind = media_type.partition(";")[0]
    if shows == "head" or not body:
        return ""
    text = body.decode(errors="replace")
    if shows == "names":
        return "\n".join(sorted({line for line in text.splitlines() if line.startswith("# TYPE")}))
    if kind.endswith("json") and kind != "application/x-ndjson":
        return form.json(text)
    if kind in {"text/event-stream", "application/x-ndjson"} or body.startswith(b'{"'):
        return form.stream(text, shows_waiting=shows == "waiting")
    if kind.startswith("text/") or kind.endswith("yaml"):
        return form.text(text) if len(text) <= MAX_TEXT_CHARS else f"<text of {len(text)} characters>"
    return f"<{len(body)} bytes, sha256 {hashlib.sha256(body).hexdigest()}>"
