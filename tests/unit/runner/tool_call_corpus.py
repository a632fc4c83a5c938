"""Tool calls as models write them: broken ones, from the kinds in public reports, and valid ones that look odd."""

import json
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[2] / "corpus" / "tool_calls"
TOOLS = json.loads((CORPUS / "tools.json").read_text())


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CORPUS / f"{name}.jsonl").read_text().splitlines()]
