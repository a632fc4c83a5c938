"""Looks up repositories on the Hugging Face hub, with file sizes and digests, using huggingface_hub."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from socket import gaierror
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from runner_svc.model_store.http_file import require_allowed_url
from runner_svc.policy.memory_estimate import MAX_CONTEXT_TOKENS
from runner_svc.policy.repository_files import RepositoryFile
from weft import __version__
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import HubSource

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_ENDPOINT = "https://huggingface.co"
ENDPOINT_VARIABLE = "HF_ENDPOINT"
LOOK_SECONDS = 30.0
SEARCH_SECONDS = 8.0
MAX_SAID_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository at one commit."""

    commit: str
    files: tuple[RepositoryFile, ...]
    headers: Mapping[str, str] = field(repr=False)
    """Request headers for its files, including the token."""
    context_tokens: int = 0
    """Training context of its GGUF files; 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRepository:
    """A search result."""

    name: str
    files: tuple[RepositoryFile, ...]
    """Without sizes and digests, which the hub returns for one repository only."""
    context_tokens: int
    """Training context of its GGUF files; 0: unknown."""
    downloads: int


class Hub:
    """The hub at one endpoint."""

    def __init__(self, environment: Mapping[str, str] = os.environ, *, allow_http: bool = False) -> None:
        self.endpoint = (environment.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT).rstrip("/")
        self._allow_http = allow_http

    def look_up(self, source: HubSource) -> Repository:
        """Returns the files of a repository.

        Raises NOT_FOUND, PERMISSION_DENIED (gated or private, with the next step), or SERVICE_UNAVAILABLE.
        """
        with self._asked(source) as api:
            found = api.model_info(
                source.repository, revision=source.revision, files_metadata=True, timeout=LOOK_SECONDS
            )
        return Repository(
            commit=found.sha or source.revision,
            files=tuple(
                RepositoryFile(
                    path=file.rfilename,
                    size_bytes=file.size or 0,
                    sha256="" if file.lfs is None else file.lfs.sha256,
                    git_digest="" if file.lfs is not None else file.blob_id or "",
                )
                for file in found.siblings or ()
            ),
            headers=_headers(api),
            context_tokens=_context_tokens(found.gguf),
        )

    def search(self, text: str, limit: int) -> list[FoundRepository]:
        """Returns repositories with GGUF files that match a text, most downloaded first. Raises SERVICE_UNAVAILABLE."""
        with self._asked(None) as api:
            from huggingface_hub import get_session  # noqa: PLC0415
            from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # noqa: PLC0415

            # `api.list_models` retries for half a minute without a network.
            parameters: dict[str, str | int | list[str]] = {
                "search": text,
                "filter": "gguf",
                "sort": "downloads",
                "limit": limit,
                "expand": ["downloads", "gguf", "siblings"],
            }
            response = get_session().get(
                f"{self.endpoint}/api/models", params=parameters, headers=_headers(api), timeout=SEARCH_SECONDS
            )
            hf_raise_for_status(response)
            try:
                return [
                    FoundRepository(
                        name=each["id"],
                        files=tuple(RepositoryFile(path=file["rfilename"], size_bytes=0) for file in each["siblings"]),
                        context_tokens=_context_tokens(each.get("gguf")),
                        downloads=int(each.get("downloads") or 0),
                    )
                    for each in response.json()
                ]
            except (KeyError, TypeError) as error:
                raise ValueError("not a list of repositories") from error

    @contextmanager
    def _asked(self, source: HubSource | None) -> Iterator["HfApi"]:
        """Yields the client for a request about a source, or a search; raises its failures as in `look_up`."""
        require_allowed_url(self.endpoint, allow_http=self._allow_http)
        from httpx2 import HTTPError  # noqa: PLC0415
        from huggingface_hub import HfApi  # noqa: PLC0415 - takes half a second, which other commands should not spend
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled  # noqa: PLC0415

        what = "search" if source is None else str(source)
        try:
            yield HfApi(endpoint=self.endpoint, library_name="weft", library_version=__version__)
        except HfHubHTTPError as error:
            raise self._explained(error, what, source) from error
        except HFValidationError as error:
            raise WeftError(Reason.INVALID_ARGUMENT, f"{what}: {str(error)[:MAX_SAID_CHARS]}") from error
        except OfflineModeIsEnabled as error:
            message = f"{what}: HF_HUB_OFFLINE is set, so the hub is not used; unset it to pull"
            raise WeftError(Reason.SERVICE_UNAVAILABLE, message) from error
        except (HTTPError, OSError, ValueError) as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, f"{what}: {self._unanswered(error)}") from error

    def file_url(self, source: HubSource, path: str, commit: str) -> str:
        """Returns the URL of a file at a commit."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415

        return hf_hub_url(source.repository, path, revision=commit, endpoint=self.endpoint)

    def _unanswered(self, error: Exception) -> str:
        """Returns why a request had no usable answer."""
        from httpx2 import ConnectError, ConnectTimeout, TimeoutException  # noqa: PLC0415

        if isinstance(error, ConnectError | ConnectTimeout | OSError):
            host = urlsplit(self.endpoint).hostname
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, gaierror):
                    return f"no internet connection ({host}: name not found); local files and attached servers work"
                cause = cause.__cause__ or cause.__context__
            return f"{self.endpoint} cannot be reached ({error or 'timeout'}); try again"
        if isinstance(error, TimeoutException):
            return f"{self.endpoint} did not answer in time; try again"
        return f"{self.endpoint} sent an invalid response; try again"

    def _explained(self, error: Exception, what: str, source: HubSource | None) -> WeftError:
        from huggingface_hub import get_token  # noqa: PLC0415
        from huggingface_hub.errors import (  # noqa: PLC0415
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        assert isinstance(error, HfHubHTTPError)
        has_token, login = bool(get_token()), "log in with `hf auth login`, or set HF_TOKEN"
        if source is not None and isinstance(error, GatedRepoError):
            page = f"{self.endpoint}/{source.repository}"
            step = "use a token of an account that has access" if has_token else login
            return WeftError(Reason.PERMISSION_DENIED, f"{source} is gated: accept its terms at {page}, then {step}")
        if source is not None and isinstance(error, RevisionNotFoundError):
            return WeftError(Reason.NOT_FOUND, f"{source}: the repository has no revision {source.revision}")
        if isinstance(error, RepositoryNotFoundError):
            step = "the token in use may not read it" if has_token else login
            return WeftError(Reason.NOT_FOUND, f"{source}: the hub has no such repository, or it is private: {step}")
        code = error.response.status_code
        if code in (401, 403):
            return WeftError(Reason.PERMISSION_DENIED, f"{what}: the hub rejects the token ({code}); {login}")
        return WeftError(Reason.SERVICE_UNAVAILABLE, f"{what}: the hub returned status {code}; try again")


def _context_tokens(gguf: Mapping[str, Any] | None) -> int:
    known = (gguf or {}).get("context_length")
    return known if isinstance(known, int) and 0 < known <= MAX_CONTEXT_TOKENS else 0


def _headers(api: "HfApi") -> dict[str, str]:
    # Documented there, but not in its __all__.
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    return build_hf_headers(token=api.token, library_name="weft", library_version=__version__)
