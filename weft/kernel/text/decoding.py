"""The exceptions of decoders of JSON and MessagePack."""

import msgspec

DECODE_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Decoding exceptions: wrong form or type, invalid UTF-8, nesting beyond the interpreter's limit."""
