"""A model file with a chat template but without tensors."""

import struct
from array import array
from pathlib import Path
from random import Random

from runner_svc.model_files.gguf import read_gguf_header

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{% if enable_thinking %}[think]{% endif %}[assistant]"
)


def write_gguf(path: Path, template: str | None = TEMPLATE, *, tool_use: str | None = None) -> Path:
    """Writes a GGUF file with the begin token `<s>` and the end token `</s>`."""
    entries = [
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + _text("<unk>") + _text("<s>") + _text("</s>"),
        _text("tokenizer.ggml.bos_token_id") + struct.pack("<II", 4, 1),
        _text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 2),
    ]
    for name, text in (("tokenizer.chat_template", template), ("tokenizer.chat_template.tool_use", tool_use)):
        if text is not None:
            entries.append(_text(name) + struct.pack("<I", 8) + _text(text))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    return path


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_projector(path: Path, *, vision: bool | None = True, audio: bool | None = None) -> Path:
    """Writes a projector without tensors. None: not stated in the header."""
    entries = [_text("general.architecture") + struct.pack("<I", 8) + _text("clip")]
    for name, encodes in (("vision", vision), ("audio", audio)):
        if encodes is not None:
            entries.append(_text(f"clip.has_{name}_encoder") + struct.pack("<I?", 7, encodes))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    return path


SMOLLM2_LAYERS, SMOLLM2_WIDTH, RANK = 30, 576, 2
_ALIGNMENT = 32


def write_adapter(path: Path, *, architecture: str = "llama", kind: str = "lora", strength: float = 0.5) -> Path:
    """Writes a LoRA with random weights for the query projections (`attn_q`) of SmolLM2-135M, the demo model.

    With a `strength` of 0.5 the model's answers are nonsense; with 0 the adapter has no effect.
    """
    entries = [
        _text("general.architecture") + struct.pack("<I", 8) + _text(architecture),
        _text("general.type") + struct.pack("<I", 8) + _text("adapter"),
        _text("adapter.type") + struct.pack("<I", 8) + _text(kind),
        _text("adapter.lora.alpha") + struct.pack("<If", 6, float(RANK)),
    ]
    random, tensors, data = Random(7), [], b""
    for layer in range(SMOLLM2_LAYERS):
        for half, shape in (("a", (SMOLLM2_WIDTH, RANK)), ("b", (RANK, SMOLLM2_WIDTH))):
            name = _text(f"blk.{layer}.attn_q.weight.lora_{half}")
            tensors.append(name + struct.pack("<IQQIQ", 2, *shape, 0, len(data)))
            numbers = array("f", (random.gauss(0.0, strength) for _ in range(SMOLLM2_WIDTH * RANK)))
            data += _padded(numbers.tobytes())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join([*entries, *tensors])
    path.write_bytes(_padded(head) + data)
    return path


def write_with_template(path: Path, source: Path, template: str) -> Path:
    """Copies a model file with another chat template, padded to whole blocks because tensors are aligned."""
    header = read_gguf_header(source)
    assert header.chat_template is not None
    old, new = _text(header.chat_template), template.encode()
    padding = (len(header.chat_template.encode()) - len(new)) % _ALIGNMENT
    raw = source.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, _text(template + "\n" * padding)))
    return path


def _padded(raw: bytes) -> bytes:
    return raw.ljust(-(-len(raw) // _ALIGNMENT) * _ALIGNMENT, b"\0")
