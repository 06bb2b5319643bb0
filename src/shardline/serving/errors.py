"""What can go wrong with a request, and what a client is told of it.

ShardlineError
 +-- ServingError                    HTTP status
      +-- RequestError               400   the client can mend it; `param` names the field (also a UsageError)
      |    +-- NotFoundError         404
      |    |    +-- ModelNotFoundError
      |    +-- BodyTooLargeError     413
      |    +-- ConflictError         409   not in the server's present state
      +-- OverloadedError            429   the waiting queue is full: try again later
      +-- GenerationFailedError      500   the engine failed this request
      +-- RequestTimeoutError        504   the reply took longer than the server allows
      +-- UnavailableError           503   not now
           +-- AsleepError                 the server sleeps: try again later
           +-- EngineDeadError             the engine has stopped for good
"""

from __future__ import annotations

from shardline.config.errors import ShardlineError, UsageError

__all__ = [
    "AsleepError",
    "BodyTooLargeError",
    "ConflictError",
    "EngineDeadError",
    "GenerationFailedError",
    "ModelNotFoundError",
    "NotFoundError",
    "OverloadedError",
    "RequestError",
    "RequestTimeoutError",
    "ServingError",
    "UnavailableError",
]


class ServingError(ShardlineError):
    """Base: `kind` and `code` are OpenAI's `type` and `code`, `param` the field at fault where there is one."""

    status = 500
    retry_after_s: int | None = None  # said to the client where waiting helps
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class RequestError(ServingError, UsageError):
    """A request that can't be run."""

    status = 400
    kind = "invalid_request_error"


class NotFoundError(RequestError):
    """Something that is not here (any more)."""

    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """A model that is not served here."""

    code = "model_not_found"


class BodyTooLargeError(RequestError):
    """A body over the server's limit."""

    status = 413
    code = "request_too_large"


class ConflictError(RequestError):
    """A request that the server's present state does not allow."""

    status = 409
    code = "conflict"


class OverloadedError(ServingError):
    """The waiting queue is full."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    retry_after_s = 1


class GenerationFailedError(ServingError):
    """The engine failed this request."""


class RequestTimeoutError(ServingError):
    """The reply took longer than the server allows."""

    status = 504
    code = "request_timeout"


class UnavailableError(ServingError):
    """The server can't answer now."""

    status = 503


class AsleepError(UnavailableError):
    """The server sleeps: its memory is given back."""

    code = "asleep"
    retry_after_s = 5


class EngineDeadError(UnavailableError):
    """The engine has stopped for good."""

    code = "engine_unhealthy"
