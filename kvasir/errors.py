"""The error tree. Everything Kvasir raises on purpose is one of these.

KvasirError
├── ConfigError      the engine cannot be built as asked: a setting, a file or the machine is wrong
│   └── ModelError   the model's own files are missing, corrupt, or of a kind we do not run
├── RequestError     one request is wrong; the engine goes on (HTTP 4xx)
│   ├── PromptTooLongError   its prompt leaves no room in the model's context
│   └── OverloadedError   nothing is wrong with it, but the queue is full (HTTP 429)
└── EngineError      the engine itself failed (HTTP 5xx)
    ├── DeviceMemoryError   a step did not fit the device's memory
    └── EngineDeadError   it failed earlier and takes no more work

A message says what was asked, what is possible and what to change.
"""


class KvasirError(Exception):
    """Base of every error raised on purpose."""

    request_id: str | None = None  # of the request at fault, where it is told later than that was added


class ConfigError(KvasirError, ValueError):
    """The engine cannot be built as asked."""


class ModelError(ConfigError):
    """A model's files are missing, corrupt, or of a kind Kvasir does not run."""


class RequestError(KvasirError, ValueError):
    """One request is wrong. `parameter` names the field at fault where there is one."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer. `num_tokens`: its length, unless it was too long to be tokenized."""

    def __init__(self, message: str, parameter: str | None = None, num_tokens: int | None = None) -> None:
        super().__init__(message, parameter)
        self.num_tokens = num_tokens


class OverloadedError(RequestError):
    """The queue is full. `retry_after`: seconds after which another try makes sense."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(KvasirError, RuntimeError):
    """The engine failed while running."""


class DeviceMemoryError(EngineError):
    """A step did not fit the device's memory. Nothing is known of what it computed."""


class EngineDeadError(EngineError):
    """The engine failed earlier and takes no more work."""
