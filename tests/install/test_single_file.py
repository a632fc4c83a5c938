"""`make single-file`: weft as one file, on an account on which nothing is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest
from bare_account import ROOT, BareAccount

from weft_app.compose.demo import DEMO_MODEL

# It builds 82 MiB, unpacks them, and deletes thousands of files.
pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]


def test_one_file_serves_the_demo_model_and_chats(packages: Path, tmp_path: Path) -> None:
    subprocess.run(["make", "single-file"], cwd=ROOT, check=True, capture_output=True)
    account = BareAccount.create(tmp_path, packages)
    weft = shutil.copy(ROOT / "dist" / "weft", account.home)
    printed = account.run(weft, "up", "-d", "--port", "0")
    try:
        assert f"{DEMO_MODEL}: ready" in printed
        assert "tokens/s" in account.run(weft, "chat", DEMO_MODEL, "Say hello", "--max-tokens", "8")
    finally:
        account.run(weft, "stop")
    shutil.rmtree(account.home)
