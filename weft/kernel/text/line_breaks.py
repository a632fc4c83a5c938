"""Line breaks of Unicode in JSON, escaped for readers of lines. Commands import this without msgspec.

JSON allows U+0085, U+2028 and U+2029 in strings as they are, but `str.splitlines` and the line readers of httpx and
requests break a line there. Other breaks are control characters, which JSON escapes.
"""


def escaped(raw: bytes) -> bytes:
    """Returns JSON with the line breaks of Unicode as escapes."""
    raw = raw.replace(b"\xc2\x85", b"\\u0085")
    return raw.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
