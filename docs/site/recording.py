"""Runs the first minutes of a new user on an empty home, and draws what was printed as a picture (SVG).

    python docs/site/recording.py docs/first-minutes.svg

Nothing of the picture is written by hand: the commands below are run on a clone of what is committed, and their output
and time are shown, the folder of the home as `~`. It needs port 8080 and the package index, which has the demo model.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-dist" / "bin"
COMMANDS = (
    "pipx install ./weft",
    "weft up -d",
    'weft chat smollm2-135m "Why is the sky blue?" --max-tokens 48',
    "weft ps",
    "weft explain",
    "weft stop",
)
COLUMNS = 108
SECONDS = 300.0
# As rich's own, without the fonts that it takes from a server.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def record(folder: Path) -> Console:
    """Runs the commands in a folder with a clone of what is committed, and returns what is to be drawn."""
    home = folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", ROOT, home / "weft"], check=True)  # noqa: S603, S607
    path = f"{home / '.local' / 'bin'}:{TOOLS}:/usr/bin:/bin"
    passed = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_CERT_"))}
    if "PIP_CERT" in passed:
        passed.setdefault("SSL_CERT_FILE", passed["PIP_CERT"])
    # What is loaded for it is removed with the folder.
    environment = {"HOME": str(home), "PATH": path, "COLUMNS": str(COLUMNS), "LANG": "C.UTF-8", **passed}
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115 - it lives as long
    for command in COMMANDS:
        began = time.monotonic()
        ended = subprocess.run(  # noqa: S602 - the commands are those above
            command,
            shell=True,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
        seconds = time.monotonic() - began
        printed = ended.stdout.decode().replace(str(home), "~").strip("\n")
        print(f"$ {command}\n{printed}\n")  # noqa: T201
        if ended.returncode:
            subprocess.run(["weft", "stop"], env=environment, cwd=home, check=False)  # noqa: S607
            raise SystemExit(f"{command} ended with {ended.returncode}; nothing was drawn")
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold"), (f"  # {seconds:.1f} s", "dim")))
        console.print(Text(printed), soft_wrap=False)
        console.print()
    return console


def main() -> None:
    """Records, and writes the picture."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="weft-recording-") as folder:
        console = record(Path(folder))
    picture = console.export_svg(title="the first minutes of weft", theme=MONOKAI, code_format=SVG, unique_id="weft")
    target.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
