from pathlib import Path

import pytest

from weft.kernel.channels.tls import ServerTls
from weft_testing.certificates import Authority


@pytest.fixture
def ca() -> Authority:
    return Authority()


@pytest.fixture
def mutual(ca: Authority, tmp_path: Path) -> ServerTls:
    """A server of 127.0.0.1 that asks for certificates of the same authority."""
    return ServerTls(files=ca.issue("127.0.0.1").write(tmp_path, ca, name="server"), requires_clients=True)
