"""What to do where an optional Python package is not installed, in the words of every error that names one."""


def missing_package(purpose: str, package: str) -> str:
    """Returns the message of an error: what needs the package, and how it is installed beside weft."""
    return (
        f"{purpose} the package {package}, which is not installed beside weft; install it there: pip install {package} "
        f"(installed by pipx: pipx inject weft {package})"
    )
