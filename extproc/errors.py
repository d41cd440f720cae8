"""The exception tree.

Exceptions are for broken configuration, a peer that breaks the protocol, and bugs.
What is expected to happen (a refusal, an unknown metric, a client that leaves) is a value.
"""

from __future__ import annotations

import errno
import re
from typing import Final

#: User and password of a URL, with the slashes in front of them.
_USER_INFO: Final = re.compile(r"//\S*@")

#: Reason of a failed connection: this process or machine may open no more files. It says nothing
#: about the peer.
TOO_MANY_FILES: Final = "too many open files"

#: Errors of files that end without a change of the file; who may read it shows in its stat fields.
_PASSING_ERRORS: Final = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
        errno.ENOENT,  # while a link is replaced
    }
)


class ExtprocError(Exception):
    """Base of everything this package raises on purpose.

    Args:
        wanted: The expected value.
        got: The actual value; users and passwords of URLs in it are left out.
        fix: Advice to the reader.
    """

    def __init__(self, *, wanted: str, got: str, fix: str) -> None:
        got = _USER_INFO.sub("//...@", got)
        super().__init__(f"expected {wanted}, got {got}; {fix}")
        self.wanted = wanted
        self.got = got
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles: a simulation in another process may find a file wrong."""
        return _again, (type(self), self.args, vars(self))


def _again(kind: type[ExtprocError], args: tuple[object, ...], facts: dict[str, object]) -> object:
    error = kind.__new__(kind, *args)
    vars(error).update(facts)
    return error


class ConfigError(ExtprocError):
    """Broken configuration: a file, a flag or an environment variable.

    Args:
        where: The file and YAML path, or the flag; kept as its text.
    """

    def __init__(self, where: object, *, wanted: str, got: str, fix: str) -> None:
        super().__init__(wanted=wanted, got=got, fix=fix)
        self.where = str(where)

    def __str__(self) -> str:
        return f"{self.where}: {super().__str__()}"


def file_error(path: object, error: OSError, *, wanted: str = "a readable file") -> ConfigError:
    """The error of a file that cannot be read or written."""
    return ConfigError(path, wanted=wanted, got=error.strerror or "", fix="check the path")


class ProtocolError(ExtprocError):
    """The data plane sent a message the ext_proc protocol does not allow at this point."""


def describe_connection_error(error: OSError) -> str:
    """Return the reason of a connection that failed otherwise than refused or timed out."""
    is_ours = error.errno in (errno.EMFILE, errno.ENFILE)
    return TOO_MANY_FILES if is_ours else "unreachable"


def is_passing_error(error: BaseException) -> bool:
    """Check if files may be readable soon without a change, such as once others are closed."""
    cause = error.__cause__ or error
    return isinstance(cause, MemoryError) or (
        isinstance(cause, OSError) and cause.errno in _PASSING_ERRORS
    )
