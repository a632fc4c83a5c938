"""A module that leaves a process, a thread or a listening socket behind fails, and its neighbours do not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly("checks the tests' own tools")

ROOT = Path(__file__).parents[3]
_LEAVES = {
    "process": """\
import subprocess, sys
def test_leaves():
    test_leaves.process = subprocess.Popen(["sleep", "4321"])
""",
    "thread": """\
import threading
def test_leaves():
    threading.Thread(target=threading.Event().wait, args=(60,), name="left-thread").start()
""",
    "listening_socket": """\
import socket
def test_leaves():
    test_leaves.socket = socket.create_server(("127.0.0.1", 0))
""",
    "unix_socket": """\
import socket
def test_leaves(tmp_path):
    test_leaves.socket = socket.socket(socket.AF_UNIX)
    test_leaves.socket.bind(str(tmp_path / "left.sock"))
    test_leaves.socket.listen()
""",
}
_LEAVES_NOTHING = """\
import socket, subprocess, sys, threading
import pytest

@pytest.fixture(scope="module", autouse=True)
def server():
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "4322"]) as process:
        yield server
        process.kill()

def test_first():
    thread = threading.Thread(target=lambda: None)
    thread.start()

def test_second(server):
    threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
    socket.create_connection(server.getsockname()).close()
"""
_PLUGIN = """\
import kit.left_behind
kit.left_behind.END_SECONDS = 0.5
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints of modules that leave something, one that does not, and one after all of them."""
    folder = tmp_path_factory.mktemp("modules")
    for name, source in _LEAVES.items():
        (folder / f"test_{name}.py").write_text(source)
    (folder / "test_a_tidy_one.py").write_text(_LEAVES_NOTHING)
    (folder / "test_z_after_them.py").write_text("def test_it():\n    pass\n")
    (folder / "sooner.py").write_text(_PLUGIN)
    plugins = ("-p", "sooner", "-p", "kit.left_behind", "-p", "no:cacheprovider", "-p", "no:xdist")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-rA", *plugins, str(folder)]
    paths = os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT)))
    # In a session of its own: what the modules leave is ended with it.
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if re.match(r"=+ .* in [\d.]+s", line):
                break
        os.killpg(process.pid, 9)
    return seen


@pytest.mark.parametrize(
    ("module", "left"),
    [
        ("process", r"process \d+: sleep 4321"),
        ("thread", "thread left-thread"),
        ("listening_socket", r"listening socket \('127.0.0.1', \d+\)"),
        ("unix_socket", r"listening socket \S+/left.sock"),
    ],
)
def test_module_that_leaks_fails_with_a_description(report: str, module: str, left: str) -> None:
    assert re.search(rf"test_{module}.py left behind: {left}\n", report)
    assert f"ERROR test_{module}.py::test_leaves" in report


def test_clean_modules_pass_before_and_after_a_leaking_one(report: str) -> None:
    assert len(re.findall(r"^PASSED test_(?:a_tidy_one|z_after_them)\.py", report, re.MULTILINE)) == 3
    assert len(re.findall("^ERROR test_", report, re.MULTILINE)) == len(_LEAVES)
