"""Runs `weft` with changed constants: `python -m kit.quick_weft CHANGES python -m weft_app.cli.main ...`.

CHANGES is JSON by `module` (constants) or `module:Class` (defaults of a dataclass). `within` builds the command.
Processes that it starts have the usual constants.
"""

import json
import sys
from importlib import import_module
from typing import Any

from kit.warm_python import warm
from weft_app.cli.main import app


def within(changes: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Returns the start of the command line."""
    return (*warm("kit.quick_weft"), json.dumps(changes))


def main() -> None:
    """Changes the constants in this process, then runs `weft`."""
    for place, values in json.loads(sys.argv[1]).items():
        module, _, name = place.partition(":")
        for constant, value in values.items():
            if name:
                kind = getattr(import_module(module), name)
                # The constructor uses its own default, pydantic that of the field.
                kind.__init__.__kwdefaults__[constant] = kind.__dataclass_fields__[constant].default = value
            else:
                assert hasattr(import_module(module), constant), f"{place} has no {constant}"
                setattr(import_module(module), constant, value)
    sys.argv = ["weft", *sys.argv[5:]]
    app()


if __name__ == "__main__":
    main()
