"""Records the signatures of ExLlamaV3 that the engine calls, for its stand-in: they are read, and nothing is imported.

    python tests/extensions/engines/record_exllamav3.py FOLDER_OF_THE_UNPACKED_WHEEL

It writes `scripted_library/exllamav3/signatures.json`.
"""

import sys
from pathlib import Path
from typing import Any

from library_signatures import signatures_of, text_of

RECORD = Path(__file__).parent / "scripted_library" / "exllamav3" / "signatures.json"
CALLED = {
    "Config": ("from_directory",),
    "Model": ("from_config", "load_gen"),
    "Tokenizer": ("from_config", "encode"),
    "Cache": ("__init__",),
    "Generator": ("__init__", "get_cache_stats"),
    "Job": ("__init__",),
    "AsyncGenerator": ("__init__", "close"),
    "AsyncJob": ("__init__", "cancel"),
    "ComboSampler": ("__init__",),
    "LLGuidanceFilter": ("__init__",),
}


def recorded(folder: Path) -> dict[str, Any]:
    (metadata,) = folder.glob("exllamav3-*.dist-info")
    version = metadata.name.removeprefix("exllamav3-").removesuffix(".dist-info")
    return {"version": version, "signatures": signatures_of(folder / "exllamav3", CALLED)}


if __name__ == "__main__":
    RECORD.write_text(text_of(recorded(Path(sys.argv[1]))), encoding="utf-8")
