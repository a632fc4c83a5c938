"""Looks up repositories on the Hugging Face hub, with file sizes and digests, using huggingface_hub."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner_svc.model_store.http_file import require_allowed_url
from runner_svc.policy.repository_files import RepositoryFile
from weft import __version__
from weft.kernel.errors import WeftError
from weft.kernel.model_source import HubSource
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_ENDPOINT = "https://huggingface.co"
ENDPOINT_VARIABLE = "HF_ENDPOINT"
LOOK_SECONDS = 30.0
MAX_SAID_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository at one commit."""

    commit: str
    files: tuple[RepositoryFile, ...]
    headers: Mapping[str, str] = field(repr=False)
    """Request headers for its files, including the token."""


class Hub:
    """The hub at one endpoint."""

    def __init__(self, environment: Mapping[str, str] = os.environ, *, allow_http: bool = False) -> None:
        self.endpoint = (environment.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT).rstrip("/")
        self._allow_http = allow_http

    def look_up(self, source: HubSource) -> Repository:
        """Returns the files of a repository.

        Raises NOT_FOUND, PERMISSION_DENIED (gated or private, with the next step), or SERVICE_UNAVAILABLE.
        """
        require_allowed_url(self.endpoint, allow_http=self._allow_http)
        from httpx2 import HTTPError  # noqa: PLC0415
        from huggingface_hub import HfApi  # noqa: PLC0415 - takes half a second, which other commands should not spend
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled  # noqa: PLC0415

        api = HfApi(endpoint=self.endpoint, library_name="weft", library_version=__version__)
        try:
            found = api.model_info(
                source.repository, revision=source.revision, files_metadata=True, timeout=LOOK_SECONDS
            )
        except HfHubHTTPError as error:
            raise self._explained(error, source) from error
        except HFValidationError as error:
            raise WeftError(Reason.INVALID_ARGUMENT, f"{source}: {str(error)[:MAX_SAID_CHARS]}") from error
        except OfflineModeIsEnabled as error:
            message = f"{source}: HF_HUB_OFFLINE is set, so the hub is not used; unset it to pull"
            raise WeftError(Reason.SERVICE_UNAVAILABLE, message) from error
        except (HTTPError, OSError, ValueError) as error:
            message = f"{source}: {self.endpoint} cannot be reached or sent an invalid response; try again"
            raise WeftError(Reason.SERVICE_UNAVAILABLE, message) from error
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
        )

    def file_url(self, source: HubSource, path: str, commit: str) -> str:
        """Returns the URL of a file at a commit."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415

        return hf_hub_url(source.repository, path, revision=commit, endpoint=self.endpoint)

    def _explained(self, error: Exception, source: HubSource) -> WeftError:
        from huggingface_hub import get_token  # noqa: PLC0415
        from huggingface_hub.errors import (  # noqa: PLC0415
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        assert isinstance(error, HfHubHTTPError)
        page, has_token = f"{self.endpoint}/{source.repository}", bool(get_token())
        login = "log in with `hf auth login`, or set HF_TOKEN"
        if isinstance(error, GatedRepoError):
            step = "use a token of an account that has access" if has_token else login
            return WeftError(Reason.PERMISSION_DENIED, f"{source} is gated: accept its terms at {page}, then {step}")
        if isinstance(error, RevisionNotFoundError):
            return WeftError(Reason.NOT_FOUND, f"{source}: the repository has no revision {source.revision}")
        if isinstance(error, RepositoryNotFoundError):
            step = "the token in use may not read it" if has_token else login
            return WeftError(Reason.NOT_FOUND, f"{source}: the hub has no such repository, or it is private: {step}")
        code = error.response.status_code
        if code in (401, 403):
            return WeftError(Reason.PERMISSION_DENIED, f"{source}: the hub rejects the token ({code}); {login}")
        return WeftError(Reason.SERVICE_UNAVAILABLE, f"{source}: the hub returned status {code}; try again")


def _headers(api: "HfApi") -> dict[str, str]:
    # Documented there, but not in its __all__.
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    return build_hf_headers(token=api.token, library_name="weft", library_version=__version__)
