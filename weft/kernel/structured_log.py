"""structlog, imported without what weft never uses of it."""

import sys


def _import_structlog() -> None:
    """Imports structlog as if rich were not installed.

    It would import rich for tracebacks that show local variables, which weft never writes: they hold prompts and keys.
    That took a tenth of the CPU time of a start, and 5 MB.
    """
    if "rich" in sys.modules:
        import structlog  # noqa: PLC0415
    else:
        sys.modules["rich"] = None  # type: ignore[assignment]  # what the import system calls a missing module
        try:
            import structlog  # noqa: F401, PLC0415
        finally:
            del sys.modules["rich"]


_import_structlog()

import structlog  # noqa: E402

__all__ = ["structlog"]
