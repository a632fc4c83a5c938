"""Seeded faults: changes one operator, constant or condition at a time, and counts the faults that the tests notice.

python .ci/mutants.py --count 60 --seed 1 -- -m "not nightly"

Run it in a scratch clone, since it changes files and puts them back. A fault is tried against the test modules that
import its module. What follows `--` is passed to pytest.
"""

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = (
    "router_svc/policy/**/*.py",
    "runner_svc/policy/*.py",
    "registry_svc/*/policy/*.py",
    "registry_svc/ledger/*.py",
    "router_svc/durable/tasks/*.py",
    "weft/dispatch/*.py",
    "gateway/openai/*.py",
    "gateway/anthropic/*.py",
    "gateway/responses/*.py",
)
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
}  # fmt: skip
TEST_FOLDERS = ("tests/unit", "tests/component", "tests/contract", "tests/extensions")
SECONDS_PER_FAULT = 300


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one file."""

    path: Path
    line: int
    before: str
    after: str
    source: str
    """The whole file with the change."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def faults_of(path: Path) -> Iterator[Fault]:
    """Yields every fault that can be made in a file."""
    text = (ROOT / path).read_text()
    for node in ast.walk(ast.parse(text)):
        changed = _changed(node) if isinstance(node, ast.expr) else None
        segment = ast.get_source_segment(text, node) if changed is not None else None
        if not isinstance(node, ast.expr) or changed is None or segment is None or "\n" in segment:
            continue
        lines = text.splitlines(keepends=True)
        line = lines[node.lineno - 1].encode()
        lines[node.lineno - 1] = (line[: node.col_offset] + changed.encode() + line[node.end_col_offset :]).decode()
        yield Fault(path, node.lineno, segment, changed, "".join(lines))


def _changed(node: ast.expr) -> str | None:
    """The source of a node with a fault in it; None for nodes that are left alone."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in SWAPS:
            return f"({ast.unparse(ast.Compare(left, [SWAPS[type(operator)]()], right))})"  # type: ignore[list-item]
        case ast.BoolOp(operator, values):
            return f"({ast.unparse(ast.BoolOp(SWAPS[type(operator)](), values))})"  # type: ignore[arg-type]
        case ast.BinOp(one, operator, other) if type(operator) in SWAPS:
            return f"({ast.unparse(ast.BinOp(one, SWAPS[type(operator)](), other))})"  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(int() as value):
            return str(not value) if isinstance(value, bool) else str(value + 1)
    return None


def tests_of(path: Path) -> list[str]:
    """Returns the test modules that import the module of a file."""
    module = path.with_suffix("").as_posix().replace("/", ".")
    package, _, name = module.rpartition(".")
    words = (f"from {module} import", f"import {module}\n", f"from {package} import {name}")
    found = (each for folder in TEST_FOLDERS for each in sorted((ROOT / folder).rglob("test_*.py")))
    return [str(each.relative_to(ROOT)) for each in found if any(word in each.read_text() for word in words)]


def is_noticed(fault: Fault, tests: list[str], arguments: list[str]) -> bool:
    """Whether a test fails with the fault."""
    file = ROOT / fault.path
    original = file.read_text()
    file.write_text(fault.source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "2", *arguments, *tests]
    try:
        code = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS_PER_FAULT, check=False).returncode
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(original)
    # 5: no test was selected.
    return code not in (0, 5)


def main() -> None:
    """Prints a line per fault, and how many of them were noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="faults to try (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="which faults are chosen (default: 1)")
    parser.add_argument("--only", nargs="*", default=[], help="faults, as printed, to try alone")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    asked = parser.parse_args()
    dice = random.Random(asked.seed)  # noqa: S311 - a choice of faults is no secret
    files = sorted({path.relative_to(ROOT) for pattern in TARGETS for path in ROOT.glob(pattern)})
    tested = [(path, tests) for path in files if (tests := tests_of(path))]
    noticed = tried = 0
    for path, tests in dice.choices(tested, k=asked.count):
        faults = list(faults_of(path))
        if not faults:
            continue
        fault = dice.choice(faults)
        if asked.only and not str(fault).startswith(tuple(asked.only)):
            continue
        is_killed = is_noticed(fault, tests, asked.pytest)
        tried, noticed = tried + 1, noticed + is_killed
        sys.stdout.write(f"{'noticed' if is_killed else 'SURVIVED'}  {fault}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{noticed} of {tried} faults noticed ({100 * noticed / max(tried, 1):.0f} %)\n")


if __name__ == "__main__":
    main()
