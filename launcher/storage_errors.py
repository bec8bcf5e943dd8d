"""What went wrong in a store, told from the exceptions of many backends; and keeping secrets out of what we say.

No backend is imported here: classes are recognised by their qualified names, so that a store which is not installed
costs nothing, and a test walks through the backends' own exception modules and fails on a class that has no entry.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from urllib.parse import urlsplit

from rung.strategies.errors import ObjectMissing, StorageError


class Trouble(str, Enum):
    """The kinds of trouble that rung tells apart. Only `TRANSIENT` is tried again."""

    MISSING = "there is no such object"
    EXISTS = "it exists already"
    TRANSIENT = "the store is not answering properly"
    DENIED = "access is denied"
    FULL = "no space is left"
    READ_ONLY = "the store is read-only"
    SHORT = "the object is shorter than expected"
    REFUSED = "the store refuses the request"
    UNKNOWN = "an error that rung does not know"


HINTS = {
    Trouble.MISSING: "check the path, and that the bucket or container exists",
    Trouble.EXISTS: "choose another name",
    Trouble.TRANSIENT: "check the network and the store, then launch again: the run goes on from its newest checkpoint",
    Trouble.DENIED: "check the credentials and the permissions of this user on that place",
    Trouble.FULL: "free some space, lower checkpoint.keep, or choose another run folder",
    Trouble.READ_ONLY: "choose a run folder that can be written",
    Trouble.SHORT: "the object was altered after it was written; use an older checkpoint",
    Trouble.REFUSED: "check the URL and the storage options",
    Trouble.UNKNOWN: "check the URL and the storage options",
}

_BY_ERRNO = {
    errno.ENOENT: Trouble.MISSING,
    errno.ENOTDIR: Trouble.MISSING,
    errno.EEXIST: Trouble.EXISTS,
    errno.EACCES: Trouble.DENIED,
    errno.EPERM: Trouble.DENIED,
    errno.EROFS: Trouble.READ_ONLY,
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    **dict.fromkeys(
        (
            errno.EAGAIN,
            errno.EBUSY,
            errno.EINTR,
            errno.ETIMEDOUT,
            errno.ECONNRESET,
            errno.ECONNREFUSED,
            errno.ECONNABORTED,
            errno.EPIPE,
            errno.EHOSTUNREACH,
            errno.EHOSTDOWN,
            errno.ENETUNREACH,
            errno.ENETDOWN,
            errno.ENETRESET,
            errno.ESTALE,
            errno.EREMOTEIO,
        ),
        Trouble.TRANSIENT,
    ),
}

_BY_STATUS = {
    401: Trouble.DENIED,
    403: Trouble.DENIED,
    404: Trouble.MISSING,
    408: Trouble.TRANSIENT,
    409: Trouble.TRANSIENT,
    412: Trouble.EXISTS,
    416: Trouble.SHORT,
    425: Trouble.TRANSIENT,
    429: Trouble.TRANSIENT,
    507: Trouble.FULL,
}

# Looked up along the method resolution order, most derived class first.
_BY_CLASS = {
    "builtins.FileNotFoundError": Trouble.MISSING,
    "builtins.NotADirectoryError": Trouble.MISSING,
    "builtins.IsADirectoryError": Trouble.REFUSED,
    "builtins.FileExistsError": Trouble.EXISTS,
    "builtins.PermissionError": Trouble.DENIED,
    "builtins.TimeoutError": Trouble.TRANSIENT,
    "builtins.ConnectionError": Trouble.TRANSIENT,
    "builtins.EOFError": Trouble.TRANSIENT,
    "builtins.OSError": Trouble.REFUSED,
    "builtins.ValueError": Trouble.REFUSED,
    "builtins.TypeError": Trouble.REFUSED,
    "builtins.NotImplementedError": Trouble.REFUSED,
    "asyncio.exceptions.TimeoutError": Trouble.TRANSIENT,
    "asyncio.exceptions.IncompleteReadError": Trouble.TRANSIENT,
    "fsspec.exceptions.FSTimeoutError": Trouble.TRANSIENT,
    "fsspec.exceptions.BlocksizeMismatchError": Trouble.REFUSED,
    "rung.launcher.storage_local.EndOfFile": Trouble.SHORT,
    "rung.launcher.storage_fsspec.ShortRead": Trouble.TRANSIENT,
    # botocore and aiobotocore
    "botocore.exceptions.HTTPClientError": Trouble.TRANSIENT,
    "botocore.exceptions.ConnectionError": Trouble.TRANSIENT,
    "botocore.exceptions.EndpointConnectionError": Trouble.TRANSIENT,
    "botocore.exceptions.IncompleteReadError": Trouble.TRANSIENT,
    "botocore.exceptions.ChecksumError": Trouble.TRANSIENT,
    "botocore.exceptions.FlexibleChecksumError": Trouble.TRANSIENT,
    "botocore.exceptions.NoCredentialsError": Trouble.DENIED,
    "botocore.exceptions.PartialCredentialsError": Trouble.DENIED,
    "botocore.exceptions.CredentialRetrievalError": Trouble.DENIED,
    "botocore.exceptions.NoAuthTokenError": Trouble.DENIED,
    "botocore.exceptions.TokenRetrievalError": Trouble.DENIED,
    "botocore.exceptions.SSOError": Trouble.DENIED,
    "botocore.exceptions.LoginError": Trouble.DENIED,
    "botocore.exceptions.RefreshWithMFAUnsupportedError": Trouble.DENIED,
    "botocore.exceptions.MetadataRetrievalError": Trouble.TRANSIENT,
    "botocore.exceptions.ClientError": Trouble.REFUSED,
    "botocore.exceptions.BotoCoreError": Trouble.REFUSED,
    "botocore.exceptions.UndefinedModelAttributeError": Trouble.REFUSED,
    "botocore.parsers.ResponseParserError": Trouble.TRANSIENT,
    # azure
    "azure.core.exceptions.ServiceRequestError": Trouble.TRANSIENT,
    "azure.core.exceptions.ServiceResponseError": Trouble.TRANSIENT,
    "azure.core.exceptions.IncompleteReadError": Trouble.TRANSIENT,
    "azure.core.exceptions.ClientAuthenticationError": Trouble.DENIED,
    "azure.core.exceptions.ResourceNotFoundError": Trouble.MISSING,
    "azure.core.exceptions.ResourceExistsError": Trouble.EXISTS,
    "azure.core.exceptions.HttpResponseError": Trouble.REFUSED,
    "azure.core.exceptions.AzureError": Trouble.REFUSED,
    "azure.core.exceptions.StreamConsumedError": Trouble.REFUSED,
    "azure.core.exceptions.StreamClosedError": Trouble.REFUSED,
    "azure.core.exceptions.ResponseNotReadError": Trouble.REFUSED,
    # aiohttp (the transport of all three, and of http:// itself)
    "aiohttp.client_exceptions.ClientConnectionError": Trouble.TRANSIENT,
    "aiohttp.client_exceptions.ClientPayloadError": Trouble.TRANSIENT,
    "aiohttp.client_exceptions.ClientResponseError": Trouble.REFUSED,
    "aiohttp.client_exceptions.InvalidURL": Trouble.REFUSED,
    "aiohttp.client_exceptions.ClientError": Trouble.REFUSED,
    "aiohttp.http_exceptions.HttpProcessingError": Trouble.TRANSIENT,
    # google
    "gcsfs.retry.HttpError": Trouble.REFUSED,
    "gcsfs.retry.ChecksumError": Trouble.TRANSIENT,
    "gcsfs.retry.NonRetryableError": Trouble.REFUSED,
    "google.api_core.exceptions.RetryError": Trouble.TRANSIENT,
    "google.api_core.exceptions.GoogleAPIError": Trouble.REFUSED,
    "google.auth.exceptions.TransportError": Trouble.TRANSIENT,
    "google.auth.exceptions.GoogleAuthError": Trouble.DENIED,
    "requests.exceptions.ConnectionError": Trouble.TRANSIENT,
    "requests.exceptions.Timeout": Trouble.TRANSIENT,
    "requests.exceptions.RequestException": Trouble.REFUSED,
}


def classify(error: BaseException) -> Trouble:
    """Which trouble an exception of a backend stands for. An HTTP status or an errno says more than a class does."""
    # Causes count: s3fs wraps answers of the server in plain OSErrors, and some backends call an object missing when
    # they could not connect.
    for each in _chain(error):
        if isinstance(each, ObjectMissing):
            return Trouble.MISSING
        if trouble_of_class(type(each)) is Trouble.TRANSIENT:
            return Trouble.TRANSIENT
        if (status := _status(each)) is not None and (trouble := trouble_of_status(status)) is not None:
            return trouble
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    return trouble_of_class(type(error))


def trouble_of_class(kind: type[BaseException]) -> Trouble:
    """The trouble that the class alone stands for; `UNKNOWN` when neither it nor a base of it has an entry."""
    for base in kind.__mro__:
        if (trouble := _BY_CLASS.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return trouble
    return Trouble.UNKNOWN


def trouble_of_status(status: int) -> Trouble | None:
    """The trouble that an HTTP status stands for; None for one that is no error."""
    if status < 400:
        return None
    return _BY_STATUS.get(status, Trouble.TRANSIENT if status >= 500 and status != 501 else Trouble.REFUSED)


def storage_error(error: BaseException, *, doing: str, url: str, secrets: tuple[str, ...] = ()) -> StorageError:
    """The error of ours for one of a backend's. `doing` is a phrase such as "reading"."""
    trouble = classify(error)
    said = scrub(" ".join(f"{type(error).__name__}: {error}".split())[:500], secrets)
    kind = ObjectMissing if trouble is Trouble.MISSING else StorageError
    where = clean_url(url)
    return kind(f"{doing} {where} failed: {trouble.value} ({said})", url=where, hint=HINTS[trouble])


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an exception carries, in any of the ways that backends have."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        metadata = response.get("ResponseMetadata")
        status = metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None
    else:
        status = getattr(error, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    try:
        status = int(status)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return status if 100 <= status < 600 else None


_SECRET_KEY = re.compile(r"key|secret|token|pass|credential|connection_string|sas|sig", re.IGNORECASE)
_SECRET_ENVIRONMENT = re.compile(
    r"^(AWS|AZURE|GOOGLE|GCS|GCSFS|FSSPEC|S3|MINIO|HF)_.*(KEY|SECRET|TOKEN|PASS|CREDENTIAL|CONNECTION_STRING)"
)
_SECRET_TEXT = re.compile(
    r"((?:sig|signature|x-amz-signature|x-amz-credential|x-amz-security-token|accountkey|sharedaccesssignature|"
    r"access_token|token|authorization|password|secret)[\"']?\s*[=:]\s*[\"']?)(?:bearer\s+|basic\s+)?[^&\s,;\"']+",
    re.IGNORECASE,
)


def secrets_of(options: Mapping[str, object] | None) -> tuple[str, ...]:
    """The secret strings among storage options (at any depth, also within credentials that are objects) and in the
    environment, longest first."""
    found: set[str] = set()

    def visit(key: str, value: object) -> None:
        if isinstance(value, Mapping):
            for inner_key, inner in value.items():
                visit(str(inner_key), inner)
        elif isinstance(value, str):
            if len(value) >= 6 and _SECRET_KEY.search(key):
                found.add(value)
        elif _SECRET_KEY.search(key):  # credentials as an object of Google's or Azure's libraries
            for inner_key, inner in getattr(value, "__dict__", {}).items():
                if isinstance(inner, str):
                    visit(inner_key, inner)

    visit("", options or {})
    found |= {v for k, v in os.environ.items() if _SECRET_ENVIRONMENT.search(k) and len(v) >= 6}
    return tuple(sorted(found, key=len, reverse=True))


def scrub(text: str, secrets: tuple[str, ...] = ()) -> str:
    """`text` without the given secrets and without anything that looks like a signature, a token or a password."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = re.sub(r"(\w+://)[^/@\s]+@", r"\1", text)
    return _SECRET_TEXT.sub(r"\1***", text)


def clean_url(url: str) -> str:
    """`url` without user, password, query and fragment: what may be shown, logged and stored.

    `abfs://container@account/...` keeps its container: there the part before the @ is a name, not a user.
    """
    if "://" not in url:
        return url
    parts = urlsplit(url)
    host = parts.netloc
    if "@" in host and (":" in host.rpartition("@")[0] or not parts.scheme.startswith(("abfs", "az", "wasb"))):
        host = host.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
