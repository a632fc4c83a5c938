"""A model file with a chat template but without tensors."""

from array import array
from pathlib import Path
from random import Random

from kit.gguf_bytes import ALIGNMENT, entry, gguf, padded, tensor, text
from runner_svc.model_files.gguf import read_gguf_header

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{% if enable_thinking %}[think]{% endif %}[assistant]"
)


def write_gguf(path: Path, template: str | None = TEMPLATE, *, tool_use: str | None = None) -> Path:
    """Writes a GGUF file with the begin token `<s>` and the end token `</s>`."""
    entries = [
        entry("general.architecture", "llama"),
        entry("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>"]),
        entry("tokenizer.ggml.bos_token_id", 1),
        entry("tokenizer.ggml.eos_token_id", 2),
    ]
    for name, words in (("tokenizer.chat_template", template), ("tokenizer.chat_template.tool_use", tool_use)):
        if words is not None:
            entries.append(entry(name, words))
    path.write_bytes(gguf(entries))
    return path


def write_projector(path: Path, *, vision: bool | None = True, audio: bool | None = None) -> Path:
    """Writes a projector without tensors. None: not stated in the header."""
    entries = [entry("general.architecture", "clip")]
    for name, encodes in (("vision", vision), ("audio", audio)):
        if encodes is not None:
            entries.append(entry(f"clip.has_{name}_encoder", encodes))
    path.write_bytes(gguf(entries))
    return path


SMOLLM2_LAYERS, SMOLLM2_WIDTH, RANK = 30, 576, 2


def write_adapter(path: Path, *, architecture: str = "llama", kind: str = "lora", strength: float = 0.5) -> Path:
    """Writes a LoRA with random weights for the query projections (`attn_q`) of SmolLM2-135M, the demo model.

    With a `strength` of 0.5 the model's answers are nonsense; with 0 the adapter has no effect.
    """
    entries = [
        entry("general.architecture", architecture),
        entry("general.type", "adapter"),
        entry("adapter.type", kind),
        entry("adapter.lora.alpha", float(RANK)),
    ]
    random, tensors, data = Random(7), [], b""
    for layer in range(SMOLLM2_LAYERS):
        for half, shape in (("a", (SMOLLM2_WIDTH, RANK)), ("b", (RANK, SMOLLM2_WIDTH))):
            tensors.append(tensor(f"blk.{layer}.attn_q.weight.lora_{half}", shape, offset=len(data)))
            numbers = array("f", (random.gauss(0.0, strength) for _ in range(SMOLLM2_WIDTH * RANK)))
            data += padded(numbers.tobytes())
    path.write_bytes(gguf(entries, tensors, data=data))
    return path


def write_with_template(path: Path, source: Path, template: str) -> Path:
    """Copies a model file with another chat template, padded to whole blocks because tensors are aligned."""
    header = read_gguf_header(source)
    assert header.chat_template is not None
    old, new = text(header.chat_template), template.encode()
    padding = (len(header.chat_template.encode()) - len(new)) % ALIGNMENT
    raw = source.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, text(template + "\n" * padding)))
    return path
