"""Secrets among the arguments of a process."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from weft.kernel.machine.hidden_argument import hide_argument
print(hide_argument("wjt_id_secret"), sys.argv[1], open("/proc/self/cmdline").read().split(chr(0))[-3:-1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep the arguments")
def test_secret_is_overwritten_in_the_process_list_and_other_arguments_stay() -> None:
    command = [sys.executable, "-c", PROGRAM, "weft://wjt_id_secret@h:1/x", "--token=wjt_id_secret"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    hidden = "*" * len("wjt_id_secret")
    assert said.strip() == f"True weft://wjt_id_secret@h:1/x ['weft://{hidden}@h:1/x', '--token={hidden}']"
