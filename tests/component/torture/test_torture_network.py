"""The network of a torture run: what its cuts cut."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.torture.network import CutKind, network_missing

TESTS = Path(__file__).parents[2]


@pytest.mark.slow("connections that get no answer")
def test_every_kind_of_cut_disturbs_a_connection_until_it_is_healed(tmp_path: Path) -> None:
    if missing := network_missing():
        pytest.skip(f"network namespaces are not permitted here: {missing}")
    command = ["unshare", "--net", sys.executable, "-m", "kit.cut_links", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    # Without answers, TCP reaches nobody in the other direction either.
    assert found == [[kind.value, [False, False], [True, True]] for kind in CutKind]
