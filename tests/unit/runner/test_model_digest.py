"""Digests of model files, and the file that caches them."""

from hashlib import sha256
from pathlib import Path

import pytest

from runner_svc.model_files.digest import model_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize("content", [b"", b"\xff\xfe garbage", b"[1, 2]", b'{"a": 1}', b'{"cut": "off', b"[" * 9_999])
async def test_damaged_digest_cache_is_replaced(model: Path, tmp_path: Path, content: bytes) -> None:
    """The task that computes digests died of it, and no model had a digest."""
    memory = tmp_path / "digests.json"
    memory.write_bytes(content)
    expected = f"sha256:{sha256(b'weights').hexdigest()}"
    assert await model_digest(model, memory) == expected
    assert expected in memory.read_text()


async def test_unwritable_digest_cache_only_disables_caching(model: Path, tmp_path: Path) -> None:
    (tmp_path / "digests.json").mkdir()
    assert await model_digest(model, tmp_path / "digests.json") == f"sha256:{sha256(b'weights').hexdigest()}"
