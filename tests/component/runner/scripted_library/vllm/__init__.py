"""A stand-in for vLLM 0.32.0 in process, with the calls that the engine makes and none of the mathematics.

It takes the arguments, fields and flags that `signatures.json` records of the library. As the real one it works on its
requests side by side, keeps prompts in blocks that requests of one salt share, refuses what it cannot do with errors of
its own, and is dead for every caller once its engine is. A token is a byte. SCRIPTED_VLLM holds switches as JSON.
"""

import json
import os
import sys
from typing import Any

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_VLLM", "{}"))
if SWITCHES.get("import_fails"):
    raise ImportError("libtorch.so: cannot open shared object file")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
