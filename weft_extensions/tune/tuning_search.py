"""The search of `weft models tune`: optuna's ask and tell over a space of load parameters."""

from typing import TYPE_CHECKING

from runner_svc.policy.tuning import Settings, Space
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadValue

if TYPE_CHECKING:
    import optuna

INSTALL = "pipx inject weft optuna"
MAX_REPEATS = 100
"""Suggestions in a row that were tried before; then the space counts as exhausted."""


class TuningSearch:
    """Suggests settings; the first suggestion is the present settings, without parameters."""

    def __init__(self, space: Space, seed: int) -> None:
        """Raises UNSUPPORTED_OPERATION if optuna is not installed."""
        try:
            import optuna  # noqa: PLC0415 - an extra, and heavy
        except ImportError as error:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"weft models tune needs optuna; run: {INSTALL}") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        # None keeps what the model has now, which may be a value outside the space.
        self._choices = {name: (None, *values) for name, values in space.items()}
        self._known: dict[tuple[tuple[str, LoadValue], ...], float | None] = {}
        self._asked: optuna.trial.Trial | None = None
        self._study.enqueue_trial(dict.fromkeys(self._choices))

    def ask(self) -> "Settings | None":
        """Returns the next settings to measure; None: everything likely was tried."""
        for _ in range(MAX_REPEATS):
            self._asked = self._study.ask()
            settings = self._settings_of(self._asked)
            if (key := _key(settings)) not in self._known:
                return settings
            self._report(self._known[key])
        return None

    def tell(self, settings: Settings, seconds: float | None) -> None:
        """Reports the duration of a typical request with the settings of the last `ask`; None: they do not work."""
        self._known[_key(settings)] = seconds
        self._report(seconds)

    def retry(self) -> None:
        """Puts the settings of the last `ask` first, because their trial was interrupted."""
        if self._asked is not None:
            params = self._asked.params
            self._report(None)
            self._study.enqueue_trial(params)

    def _report(self, seconds: float | None) -> None:
        if self._asked is not None:
            self._study.tell(self._asked, seconds, state=self._failed if seconds is None else None)

    def _settings_of(self, trial: "optuna.trial.Trial") -> Settings:
        found = {name: trial.suggest_categorical(name, choices) for name, choices in self._choices.items()}
        return {name: value for name, value in found.items() if value is not None}


def _key(settings: Settings) -> tuple[tuple[str, LoadValue], ...]:
    return tuple(sorted(settings.items()))
