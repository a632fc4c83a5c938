"""A LoRA adapter in PEFT's format with random weights for the demo model."""

import json
import struct
from array import array
from pathlib import Path
from random import Random

LAYERS, WIDTH, RANK = 30, 576, 8


def write_peft_adapter(folder: Path, *, strength: float = 0.5) -> Path:
    """Writes an adapter for the query projections (`q_proj`) of SmolLM2-135M; returns its folder.

    With a `strength` of 0.5 the model's answers are nonsense; with 0 the adapter has no effect.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    random, header, data = Random(7), {}, b""
    for layer in range(LAYERS):
        for half, shape in (("A", (RANK, WIDTH)), ("B", (WIDTH, RANK))):
            raw = array("f", (random.gauss(0.0, strength) for _ in range(RANK * WIDTH))).tobytes()
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    return folder
