"""A Python whose `-m venv` copies a prepared environment, because creating one takes seconds.

Its pip is linked to the tests' pip: copying and compiling its files would take longer than a test.
"""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

_SCRIPT = """#!/bin/sh
if [ "$3" = venv ]; then exec cp -a {made} "$4"; fi
exec {python} "$@"
"""


def write_copied_python(folder: Path) -> Path:
    """Writes the program into `folder` and returns its path."""
    made = folder / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    pip = importlib.util.find_spec("pip")
    assert pip is not None
    assert pip.origin is not None
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(made)}))
    (packages / "pip").symlink_to(Path(pip.origin).parent)
    script = folder / "python"
    script.write_text(_SCRIPT.format(made=made, python=sys.executable), "utf-8")
    script.chmod(0o755)
    return script
