"""The mesh of these tests is the one of the end-to-end tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
