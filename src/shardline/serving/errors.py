"""What can go wrong with a request, and what a client is told of it.

ShardlineError
 +-- ServingError                    HTTP status
      +-- RequestError               400   the client can mend it; `param` names the field (also a UsageError)
      |    +-- ModelNotFoundError    404
      |    +-- BodyTooLargeError     413
      +-- OverloadedError            429   the waiting queue is full: try again later
      +-- GenerationFailedError      500   the engine failed this request
      +-- EngineDeadError            503   the engine has stopped for good
"""

from __future__ import annotations

from shardline.config.errors import ShardlineError, UsageError

__all__ = [
    "BodyTooLargeError",
    "EngineDeadError",
    "GenerationFailedError",
    "ModelNotFoundError",
    "OverloadedError",
    "RequestError",
    "ServingError",
]


class ServingError(ShardlineError):
    """Base: `kind` and `code` are OpenAI's `type` and `code`, `param` the field at fault where there is one."""

    status = 500
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


class ModelNotFoundError(RequestError):
    """A model that is not served here."""

    status = 404
    code = "model_not_found"


class BodyTooLargeError(RequestError):
    """A body over the server's limit."""

    status = 413
    code = "request_too_large"


class OverloadedError(ServingError):
    """The waiting queue is full."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class GenerationFailedError(ServingError):
    """The engine failed this request."""


class EngineDeadError(ServingError):
    """The engine has stopped for good."""

    status = 503
    code = "engine_unhealthy"
