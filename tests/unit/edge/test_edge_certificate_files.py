"""The certificate file that a running Envoy gets."""

import asyncio
from pathlib import Path

from weft.kernel.channels.tls import TlsSource
from weft_app.config.config import EdgeSettings
from weft_app.edge.plan import EdgePlan, Endpoint
from weft_app.edge.process import CERTIFICATE_CHECK_SECONDS, EdgeProxy
from weft_testing.certificates import Authority
from weft_testing.fake_clock import FakeClock

HERE = Endpoint(host="127.0.0.1", port=0)
PLAN = EdgePlan(listen=HERE, gateways=(HERE,), limits=EdgeSettings())


async def test_new_certificate_is_written_once_the_disk_takes_it(tmp_path: Path) -> None:
    authority, clock, folder = Authority(), FakeClock(), tmp_path / "run"
    files = authority.issue("localhost").write(tmp_path)
    proxy = EdgeProxy(PLAN, Path("envoy"), folder, clock, tls=files, ended=lambda _: None, restarted=lambda: None)
    following = asyncio.create_task(proxy._follow_certificate(TlsSource(files)))

    async def check() -> None:
        await clock.wait_for_sleepers(1)
        await clock.advance(CERTIFICATE_CHECK_SECONDS)
        checked = asyncio.create_task(clock.wait_for_sleepers(1))
        await asyncio.wait({following, checked}, return_when=asyncio.FIRST_COMPLETED)
        checked.cancel()

    folder.write_text("not a folder, so that nothing can be written in it")
    await check()
    assert not following.done()
    folder.unlink()
    await check()
    assert (folder / "envoy-certificate.json").is_file()
    following.cancel()
