"""Errors that users see: each message names what was wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ConfigError",
    "EngineError",
    "GrammarError",
    "ModelError",
    "NothingFitsError",
    "PluginError",
    "RequestError",
    "TokenSpeedError",
    "UnusableChoiceError",
]


class TokenSpeedError(Exception):
    """Base of every error raised on purpose; the command line prints its text without a traceback."""


class ConfigError(TokenSpeedError):
    """A flag, option or file is wrong. The command line exits with code 2."""


class PluginError(TokenSpeedError):
    """A plugin that is needed cannot be used, or two plugins contradict each other."""


class NothingFitsError(PluginError):
    """No candidate can fill a slot, and none was asked for by name: a caller that can do without may go on.

    Args:
        message: every candidate with its reason.
        broken: of candidates that were made for this use and cannot run, what is wrong with them; empty where there are none.
        refused: (candidate, reason) of each.
    """

    def __init__(self, message: str, *, broken: str = "", refused: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.broken, self.refused = broken, tuple(refused)


class UnusableChoiceError(PluginError, ConfigError):
    """What a flag names is installed and cannot run here: as wrong a setting as a name that nobody has."""


class ModelError(TokenSpeedError):
    """The model's files are missing, unreadable, or do not fit the model class."""


class EngineError(TokenSpeedError):
    """The engine process failed or is gone."""


class RequestError(TokenSpeedError):
    """One request is refused (HTTP 400 unless ``status`` says otherwise).

    Args:
        message: what was wrong and what to do.
        param: the request field at fault, or ``None``.
        code: machine-readable code, for example ``context_length_exceeded``.
        status: the HTTP status to answer with.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class GrammarError(RequestError):
    """A grammar of a request cannot be used: malformed, too large, or asking for what would not be enforced. The message names keyword and path."""
