"""The program: `kit.fake_comfyui --port 8188 [--folder DIR] [--step-seconds 0.1]`."""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kit.fake_comfyui.server import FakeComfyUi


def main(arguments: Sequence[str]) -> None:
    """Runs until a signal. The flags are ComfyUI's, but for --step-seconds."""
    parser = argparse.ArgumentParser(prog="fake_comfyui")
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output-directory", type=Path)
    parser.add_argument("--input-directory", type=Path)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("output", "input"):
            place = getattr(asked, f"{name}_directory")
            if place is not None:
                place.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(place.resolve(), target_is_directory=True)
        asyncio.run(_serve(folder, asked.listen, asked.port, asked.step_seconds))


async def _serve(folder: Path, host: str, port: int, step_seconds: float) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with FakeComfyUi(folder, host=host, port=port) as server:
        server.worker.pace.step_seconds = step_seconds
        sys.stdout.write(f"To see the GUI go to: {server.url}\n")
        sys.stdout.flush()
        await stop.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
