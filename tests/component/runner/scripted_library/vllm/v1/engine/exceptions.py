"""The library's errors about its engine."""


class EngineGenerateError(Exception): ...


class EngineDeadError(Exception):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")
