"""Forms with incomplete files, or oversized ones."""

from bad_inputs_stage import Case, Endpoint, Send, later, of_kind, request

_UPLOADS = of_kind("upload")
# Unsupported endpoints refuse the request before they read its body.
_REFUSED = frozenset({400, 501})
_TOO_LARGE = frozenset({413, 501})


def _form(body: bytes, content_type: str = "multipart/form-data; boundary=edge") -> Send:
    return lambda endpoint: request(endpoint, body, {"Content-Type": content_type})


def _part(head: bytes, data: bytes = b"x") -> bytes:
    return b"--edge\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


def _declared(endpoint: Endpoint) -> bytes:
    headers = {"Content-Type": "multipart/form-data; boundary=edge", "Content-Length": "200000000"}
    return request(endpoint, b"", headers)


_FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"'
_MODEL = _part(b'Content-Disposition: form-data; name="model"', b"tiny")
_END = b"--edge--\r\n"

CASES = (
    Case("H26 no end", _form(_MODEL + _part(_FILE)), _REFUSED, _UPLOADS),
    Case("H26 empty", _form(b""), _REFUSED, _UPLOADS),
    Case("H26 no parts", _form(_END), _REFUSED, _UPLOADS),
    Case("H26 no boundary", _form(_MODEL + _END, "multipart/form-data"), _REFUSED, _UPLOADS),
    Case("H26 another boundary", _form(_MODEL + _END, "multipart/form-data; boundary=other"), _REFUSED, _UPLOADS),
    Case("H26 boundary of 71", _form(_MODEL, "multipart/form-data; boundary=" + "x" * 71), _TOO_LARGE, _UPLOADS),
    Case("H26 boundary of 20 KB", _form(_MODEL, "multipart/form-data; boundary=" + "x" * 20_000), _TOO_LARGE, _UPLOADS),
    Case("H26 10,000 parts", _form(_MODEL * 10_000 + _END), _TOO_LARGE, _UPLOADS),
    Case("H26 part header of 20 KB", _form(_part(b"X-Large: " + b"x" * 20_000) + _END), _TOO_LARGE, _UPLOADS),
    Case("H26 part without a name", _form(_part(b"X-Other: a") + _END), _REFUSED, _UPLOADS),
    Case("H26 NUL in a filename", _form(_MODEL + _part(_FILE.replace(b"a.wav", b"a\x00b")) + _END), _REFUSED, _UPLOADS),
    Case("H26 no file", _form(_MODEL + _END), _REFUSED, _UPLOADS),
    Case("H26 model twice", _form(_MODEL * 2 + _part(_FILE) + _END), _REFUSED, _UPLOADS),
    Case("H26 model a file", _form(_part(_FILE.replace(b'"file"', b'"model"')) + _END), _REFUSED, _UPLOADS),
    Case("H26 file as JSON", _form(b'{"model":"tiny"}', "application/json"), _REFUSED, _UPLOADS),
    Case("H26 200 MB declared", _declared, _TOO_LARGE, _UPLOADS),
    Case(
        "H26 file of 70 MB", later(lambda: _form(_MODEL + _part(_FILE, b"x" * 70_000_000) + _END)), _TOO_LARGE, _UPLOADS
    ),
)
