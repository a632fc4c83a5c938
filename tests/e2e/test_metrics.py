"""The metrics of a mesh as a scraper gets them, and the reference that lists them."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from apart_mesh import running_apart
from chats import answers
from mesh_process import eventually, fake_runner, running_mesh, write_config
from prometheus_client.parser import text_string_to_metric_families
from reference_pages.metrics import defined_metrics, metrics_of

RUNNER_API = Path(__file__).parents[2] / "gateway" / "runner_api" / "runner_api_metrics.py"


def documented() -> set[str]:
    """The metrics of the reference."""
    return {each.name for each in defined_metrics()}


def exposed(page: str) -> set[str]:
    """The names on a page, of counters without their `_total`; those of engines and of the process are left out."""
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    return {name.removesuffix("_total") for name in names if name.startswith(("weft_", "gen_ai_"))}


async def _page(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


def _values(page: str, name: str) -> dict[str, float]:
    """Values of the samples of a name, by their labels."""
    return {
        ",".join(f"{label}={value}" for label, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a mesh that has answered a request."""
    folder = tmp_path_factory.mktemp("metrics")
    config = write_config(folder, fake_runner("a", answer_tokens=5, tokens_per_second=500))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        assert asyncio.run(answers(mesh.url, "m-a"))
        yield asyncio.run(_page(f"{mesh.url}/metrics"))


def test_reference_lists_exactly_the_metrics_of_a_mesh(scraped: str) -> None:
    of_runner_apis = {each.name for each in metrics_of(RUNNER_API.read_text("utf-8"))}
    found = exposed(scraped)
    assert len(found) > 60
    assert found - documented() == set(), "these are on the page of a mesh, and not in the reference"
    # This mesh has no certificate in weft.yaml.
    of_others = of_runner_apis | {"weft_certificate_expiry_timestamp_seconds"}
    assert documented() - found == of_others, "these are in the reference, and not on the page of a mesh"


def test_mesh_metrics_page_has_the_request_with_runner_and_engine(scraped: str) -> None:
    [labels] = _values(scraped, "gen_ai_server_request_duration_seconds_count")
    assert "gen_ai_request_model=m-a" in labels
    assert _values(scraped, "weft_runner_slots") == {"model=m-a,runner=a": 4.0}
    assert _values(scraped, "weft_failed_runner_scrapes_total") == {"runner=a": 0.0}
    assert set(_values(scraped, "weft_event_loop_delay_seconds_count")) == {
        "service=mesh",
        "runner=a,service=runner",
    }
    assert _values(scraped, "llamacpp:requests_processing").keys() == {"model=m-a,runner=a"}
    assert "a secret" not in scraped


def test_each_separate_service_serves_metrics_if_configured(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a", answer_tokens=1))
    own = {
        "registry": set[str](),
        "router": {"weft_router_waiting", "gen_ai_server_request_duration_seconds"},
        "runner": {"weft_runner_slots"},
        "gateway": {"weft_gateway_requests"},
    }

    async def scrape(service: str) -> str:
        path = str(tmp_path / f"{service}.m")
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession(connector=connector) as http, http.get("http://x/metrics") as answer:
            return await answer.text()

    with running_apart(tmp_path, config, ()) as mesh:
        for service in own:
            address = mesh.start(service, "--metrics", f"unix:{tmp_path / f'{service}.m'}")
        url = address
        asyncio.run(eventually(partial(answers, url, "m-a"), 20.0, "no answer"))
        pages = {service: asyncio.run(scrape(service)) for service in own}
    listed = documented()
    for service, names in own.items():
        found = exposed(pages[service])
        assert names <= found
        assert found <= listed
        assert set(_values(pages[service], "weft_event_loop_delay_seconds_count")) == {f"service={service}"}
