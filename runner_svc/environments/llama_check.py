"""Checks that a llama-server decodes on the devices of its variant: llama_check.py PROGRAM VARIANT.

It serves a tiny model with random weights, asks for a few tokens, and looks for the device in the server's log. It uses
only the standard library.
"""

import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from random import Random
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

TOKENS = 16
START_SECONDS = 600.0
"""A driver may compile its shaders for minutes."""
END_SECONDS = 10.0
MAX_LOG_LINES = 20
WIDTH, HEADS, HIDDEN, CONTEXT = 64, 2, 128, 256
DEVICES = {"cuda": r"CUDA\d", "vulkan": r"Vulkan\d", "rocm": r"ROCm\d", "metal": r"M(?:TL|etal)"}
"""Pattern of a device's buffer in the log, by variant."""
_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6
"""Types of tokens."""


def main(program: str, variant: str) -> str:
    """Returns why the program does not work; empty: it does."""
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder, "tiny.gguf"), Path(folder, "log")
        write_model(model)
        layers = "0" if variant == "cpu" else "99"
        flags = ["--host", "127.0.0.1", "--port", "0", "--ctx-size", str(CONTEXT), "--n-gpu-layers", layers]
        with log.open("wb") as output:
            command = [program, "--model", str(model), *flags, "--threads", "1", "--no-warmup", "--verbose"]
            server = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)  # noqa: S603 - just built
            try:
                fault = _ask(server, log)
            finally:
                _end(server)
        said = log.read_text("utf-8", "replace")
        pattern = DEVICES.get(variant)
        if not fault and pattern is not None and not re.search(rf"{pattern}\S* +(?:model|KV) buffer size", said):
            fault = f"it decodes, but on no {variant} device"
        # The installation keeps only the last lines.
        return "\n".join([*said.splitlines()[-MAX_LOG_LINES:], fault]) if fault else ""


def _ask(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """Waits for the server, decodes some tokens, and returns what failed."""
    opener, deadline = build_opener(ProxyHandler({})), time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r"listening on (?:http://)?127\.0\.0\.1:(\d+)", log.read_text("utf-8", "replace"))
        if found is None:
            time.sleep(0.1)
            continue
        body = {"prompt": "weft", "n_predict": TOKENS, "ignore_eos": True, "temperature": 0}
        request = Request(f"http://127.0.0.1:{found[1]}/completion", json.dumps(body).encode())
        try:
            with opener.open(request, timeout=START_SECONDS) as answer:
                count = json.load(answer).get("tokens_predicted")
        except (URLError, OSError, ValueError) as error:
            if "503" not in str(error):
                return f"it does not answer: {error}"
            time.sleep(0.1)
            continue
        return "" if count == TOKENS else f"it decoded {count} of {TOKENS} tokens"
    return f"it ended with code {server.poll()}" if server.poll() is not None else "it does not start in time"


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def write_model(path: Path) -> None:
    """Writes a model of one layer with random weights, whose tokens are bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256
    entries = [
        _text("general.architecture") + struct.pack("<I", _STRING) + _text("llama"),
        *(
            _text(f"llama.{name}") + struct.pack("<II", _UINT32, value)
            for name, value in {
                "context_length": CONTEXT,
                "embedding_length": WIDTH,
                "block_count": 1,
                "feed_forward_length": HIDDEN,
                "attention.head_count": HEADS,
                "rope.dimension_count": WIDTH // HEADS,
            }.items()
        ),
        _text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", _FLOAT32, 1e-5),
        _text("tokenizer.ggml.model") + struct.pack("<I", _STRING) + _text("llama"),
        _array("tokenizer.ggml.tokens", _STRING, b"".join(map(_text, tokens)), len(tokens)),
        _array("tokenizer.ggml.scores", _FLOAT32, array("f", [0.0] * len(tokens)).tobytes(), len(tokens)),
        _array("tokenizer.ggml.token_type", _INT32, array("i", kinds).tobytes(), len(tokens)),
        *(
            _text(f"tokenizer.ggml.{name}_token_id") + struct.pack("<II", _UINT32, number)
            for number, name in enumerate(("unknown", "bos", "eos"))
        ),
    ]
    square, wide, narrow = (WIDTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (WIDTH, len(tokens)),
        "output_norm.weight": (WIDTH,),
        "output.weight": (WIDTH, len(tokens)),
        "blk.0.attn_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{name}.weight": square for name in ("q", "k", "v", "output")},
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.ffn_gate.weight": wide,
        "blk.0.ffn_up.weight": wide,
        "blk.0.ffn_down.weight": narrow,
    }
    random, tensors, data = Random(7), [], b""  # noqa: S311 - weights
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data)))
        data += _padded(array("f", (random.gauss(0.0, 0.2) for _ in range(count))).tobytes())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join([*entries, *tensors])
    path.write_bytes(_padded(head) + data)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _array(name: str, kind: int, data: bytes, count: int) -> bytes:
    return _text(name) + struct.pack("<IIQ", _ARRAY, kind, count) + data


def _padded(raw: bytes) -> bytes:
    return raw.ljust(-(-len(raw) // _ALIGNMENT) * _ALIGNMENT, b"\0")


if __name__ == "__main__":
    # An empty text would be a failure.
    sys.exit(main(*sys.argv[1:]) or None)
