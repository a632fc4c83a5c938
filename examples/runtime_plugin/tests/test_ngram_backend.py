"""The backend port's suite on the n-gram server, as a package of its own runs it: `pytest examples/runtime_plugin`."""

import sys
from pathlib import Path
from unittest import SkipTest

import pytest

from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.model_engine import ModelContext
from weft_testing.conformance.backend import BackendConformance, Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft_ngram.backend import NgramBackend
from weft_ngram.runtime import NgramModel

pytestmark = pytest.mark.slow("starts engine processes")

TEXT = "the weft crosses the warp and the warp carries the weft over and under until the cloth is done again\n"


class TestNgramBackend(BackendConformance):
    """Every promise of the port; faults that this server cannot be made to have are skipped."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
        self._text = tmp_path / "text.txt"

    def make_backend(self, engine: Engine) -> NgramBackend:
        """A backend over a server that behaves as `engine` says."""
        if engine not in (Engine.NORMAL, Engine.SLOW, Engine.EXITS_AT_START):
            raise SkipTest("this server has no such fault")
        self._text.write_text("" if engine is Engine.EXITS_AT_START else TEXT * 20, encoding="utf-8")
        model = NgramModel(
            name="ngram",
            text=self._text,
            slots=1 if engine is Engine.SLOW else 4,
            context_tokens=4096,
            tokens_per_second=20.0 if engine is Engine.SLOW else 10_000.0,
        )
        graces = StopGraces(first_term_seconds=0.5, second_term_seconds=0.5)
        return NgramBackend(model, ModelContext(where="model", graces=graces))
