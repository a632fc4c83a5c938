"""The fields that tell a server how to use its prefix cache."""

from typing import Any

import pytest
from kit.engine_settings import engine_settings

from runner_svc.backend.port import CacheIsolation, CacheUse
from runner_svc.openai_upstream.request import add_cache_use
from runner_svc.runtimes.openai_http.backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel


@pytest.mark.parametrize(
    ("use", "has_slots", "added"),
    [
        (CacheUse(), True, {}),
        (CacheUse(slot=0), True, {"id_slot": 0}),
        (CacheUse(slot=3, fresh=True), True, {"id_slot": 3, "cache_prompt": False}),
        (CacheUse(slot=3, fresh=True), False, {}),
        (CacheUse(salt="abc"), False, {"cache_salt": "abc"}),
    ],
)
def test_each_server_gets_its_own_request_fields(use: CacheUse, has_slots: bool, added: dict[str, Any]) -> None:
    body: dict[str, Any] = {}
    add_cache_use(body, use, has_slots=has_slots)
    assert body == added


@pytest.mark.parametrize(("knows_salt", "isolation"), [(True, CacheIsolation.SALT), (False, CacheIsolation.NONE)])
def test_attached_server_isolates_only_if_it_supports_salts(knows_salt: bool, isolation: CacheIsolation) -> None:
    config = engine_settings(OpenAiHttpModel, url="http://127.0.0.1:1", upstream_model="m", cache_salt=knows_salt)
    assert AttachedServer(*config).cache_isolation is isolation
