"""Writes the demo model, a GGUF file, as a folder of Hugging Face's form; run in the environment of conversions.

Usage: unpack_smollm2.py GGUF FOLDER DTYPE
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    """Convert the weights to DTYPE, such as bfloat16, and keep tokenizer and chat template."""
    source, target, dtype = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
    # Quantized weights cannot be saved.
    whole = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=whole, dtype=dtype
    ).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    main()
