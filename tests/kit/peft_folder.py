"""A LoRA adapter in PEFT's format with random weights for the demo model."""

import json
import struct
from pathlib import Path

LAYERS, WIDTH, RANK = 30, 576, 8


def write_peft_adapter(folder: Path) -> Path:
    """Writes an adapter without effect for the query projections (`q_proj`) of SmolLM2-135M; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    header, data = {}, b""
    for layer in range(LAYERS):
        for half, shape in (("A", (RANK, WIDTH)), ("B", (WIDTH, RANK))):
            raw = bytes(4 * RANK * WIDTH)
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    return folder
