"""Draws the routing table of bench/RESULTS.md as docs/routing.svg: bars from p50 to p95 of the first token."""

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE, RESULTS = ROOT / "docs" / "routing.svg", ROOT / "bench" / "RESULTS.md"
HEAD = "| prefill per prompt token | weft | smg | vllm-router |"
FASTEST_MS, SLOWEST_MS = 10, 10_000
WIDTH, LEFT, PANEL, BAR, GROUP, TOP = 900, 104, 310, 14, 76, 54
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #16191d } .faint { fill: #59636e } .ground { fill: #fff }
.grid { stroke: #cfd5da } .other { fill: #a3adb7 } .weft { fill: #0f766e } .title { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed } .faint { fill: #a3adb7 } .ground { fill: #14171a }
  .grid { stroke: #3a4148 } .other { fill: #59636e } .weft { fill: #35b8aa }
}"""


def picture(results: str) -> str:
    """Returns the table as SVG: a panel for each speed, a group for each workload, a bar for each router."""
    lines = results[results.index(HEAD) :].partition("\n\n")[0].splitlines()
    names, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:]))
    speeds = list(dict.fromkeys(row[0].partition(", ")[0] for row in rows))
    groups = len(rows) // len(speeds)
    height = TOP + groups * GROUP + 28
    parts = [*_grid(speeds, height)]
    for number, (workload, *cells) in enumerate(rows):
        speed, _, title = workload.partition(", ")
        x, y = LEFT + speeds.index(speed) * (PANEL + 76), TOP + number % groups * GROUP
        parts.append(f'<text class="title" x="{x}" y="{y}">{title or "64 sessions"}</text>')
        for name, cell in zip(names[1:], cells, strict=True):
            p50, p95 = (float(text.replace(",", "")) for text in cell.split(", ")[:2])
            y += BAR + 3
            begin, end = x + _place(p50), x + _place(p95)
            kind = "weft" if name == "weft" else "other"
            parts.append(
                f'<rect class="{kind}" x="{begin:.0f}" y="{y - 10}" width="{end - begin:.0f}" height="{BAR - 2}"/>'
            )
            parts.append(f'<text class="faint" x="{end + 5:.0f}" y="{y}">{_text(p50)} to {_text(p95)}</text>')
            if x == LEFT:
                parts.append(f'<text text-anchor="end" x="{x - 8}" y="{y}">{name}</text>')
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _grid(speeds: list[str], height: int) -> Iterator[str]:
    yield f'<rect class="ground" width="{WIDTH}" height="{height}"/>'
    for number, speed in enumerate(speeds):
        x = LEFT + number * (PANEL + 76)
        yield f'<text class="title" x="{x}" y="20">{speed} per prompt token: first token, p50 to p95</text>'
        for ms in (10, 100, 1_000, 10_000):
            at = f"{x + _place(ms):.0f}"
            yield f'<path class="grid" d="M{at} {TOP - 14}V{height - 22}"/>'
            yield f'<text class="faint" text-anchor="middle" x="{at}" y="{height - 8}">{_text(ms)}</text>'


def _place(ms: float) -> float:
    return PANEL * math.log(ms / FASTEST_MS) / math.log(SLOWEST_MS / FASTEST_MS)


def _text(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1_000 else f"{ms / 1_000:.3g} s"


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(RESULTS.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
