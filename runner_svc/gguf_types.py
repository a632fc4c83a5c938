"""Numbers of the GGUF format: how large tensors of each type are, and what kinds of files are called.

Sizes as ggml's own `ggml_type_size` and `ggml_blck_size` give them, names as in llama.cpp's `llama_ftype`; both of
November 2026.
"""

from collections.abc import Mapping
from types import MappingProxyType

BLOCKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        kind: (block_bytes, block_values)
        for block_values, kinds in (
            (1, {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}),
            (32, {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 36, 20: 18, 39: 17}),
            (64, {40: 36, 42: 18}),
            (128, {41: 18}),
            (256, {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98, 19: 50}),
            (256, {21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66}),
        )
        for kind, block_bytes in kinds.items()
    }
)
"""Bytes per block and values per block by tensor type."""
_UP_TO_BF16 = (
    "q8_0 q5_0 q5_1 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k iq2_xxs iq2_xs q2_k_s iq3_xs iq3_xxs "
    "iq1_s iq4_nl iq3_s iq3_m iq2_s iq2_m iq4_xs iq1_m bf16"
)
FILE_TYPES: Mapping[int, str] = MappingProxyType(
    {
        **dict(enumerate(["f32", "f16", "q4_0", "q4_1"])),
        **dict(enumerate(_UP_TO_BF16.split(), start=7)),
        **dict(enumerate(["tq1_0", "tq2_0", "mxfp4", "nvfp4", "q1_0", "q2_0"], start=36)),
    }
)
"""What most of a file's tensors are, by `general.file_type`."""
GUESSED_FILE_TYPE = 1024
"""A bit that says that nobody was sure; the rest is the type."""
