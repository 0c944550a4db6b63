"""One exception for each status that a daemon or the way to it can answer with.

>>> try:
...     raise ResourceExhausted("Decode", "127.0.0.1:50051", "no pages", retry_after_s=0.02)
... except Error as error:
...     print(error, error.code, error.retry_after_s)
Decode at 127.0.0.1:50051: no pages RESOURCE_EXHAUSTED 0.02
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from fp8kvd.types import DecodeReply, Handle, ItemError


class Error(Exception):
    """Whatever went wrong with a call. `details` are the daemon's own words."""

    code: ClassVar[str] = "UNKNOWN"

    def __init__(self, call: str, target: str, details: str,
                 retry_after_s: float | None = None) -> None:
        super().__init__(f"{call} at {target}: {details}")
        self.call, self.target, self.details = call, target, details
        # What the daemon advises: None, nothing; negative, do not try again.
        self.retry_after_s = retry_after_s


class InvalidArgument(Error):
    """A field is missing, malformed, of a wrong size or out of its range."""

    code = "INVALID_ARGUMENT"


class NotFound(Error):
    """No such model, or a handle that is unknown, freed, expired or of another run."""

    code = "NOT_FOUND"


class SequencesLost(NotFound):
    """The daemon was started anew: every sequence of its earlier run is gone.

    Make new sequences and append their tokens again. handles: those of the failed call.
    """

    def __init__(self, call: str, target: str, handles: Sequence[Handle], incarnation: int) -> None:
        before = sorted({handle.incarnation for handle in handles})
        super().__init__(call, target, (
            f"the daemon was restarted (its run is {incarnation:#x}, the sequences are of "
            f"{', '.join(f'{run:#x}' for run in before)}), so they are gone; create new sequences "
            "and append their tokens again"))
        self.handles, self.incarnation = tuple(handles), incarnation


class OutOfRange(Error):
    """An append that starts or ends beyond the committed length, which the text names."""

    code = "OUT_OF_RANGE"


class AlreadyExists(Error):
    """An append of other bytes where tokens are committed."""

    code = "ALREADY_EXISTS"


class FailedPrecondition(Error):
    """An append too old to compare, or positions that a window has dropped."""

    code = "FAILED_PRECONDITION"


class ResourceExhausted(Error):
    """No pages, sequences or queue places, still after the retries that the daemon asked for."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(Error):
    """The timeout passed, retries and waits included."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(Error):
    """The call was cancelled, or the client closed while it ran."""

    code = "CANCELLED"


class Unavailable(Error):
    """Nobody listens there, the connection broke, or the daemon drains or lost its device."""

    code = "UNAVAILABLE"


class Unimplemented(Error):
    """No kernel for the shape, or a call that this daemon does not have."""

    code = "UNIMPLEMENTED"


class Unauthenticated(Error):
    """The token is missing or not accepted."""

    code = "UNAUTHENTICATED"


class PermissionDenied(Error):
    """The token does not allow this."""

    code = "PERMISSION_DENIED"


class Internal(Error):
    """A fault of the daemon."""

    code = "INTERNAL"


class BatchError(Error):
    """Some items of a batch failed; reply holds what the others gave (None: no decode)."""

    def __init__(self, call: str, target: str, items: int, item_errors: Sequence[ItemError],
                 reply: DecodeReply | None) -> None:
        first = item_errors[0]
        super().__init__(call, target, f"{len(item_errors)} of {items} items failed; item "
                         f"{first.index}: {first.code}: {first.message}",
                         max(error.retry_after_s for error in item_errors) or None)
        self.item_errors, self.reply = tuple(item_errors), reply


_BY_CODE: dict[str, type[Error]] = {
    error.code: error for error in (
        InvalidArgument, NotFound, OutOfRange, AlreadyExists, FailedPrecondition,
        ResourceExhausted, DeadlineExceeded, Cancelled, Unavailable, Unimplemented,
        Unauthenticated, PermissionDenied, Internal)}


def from_code(code: str, call: str, target: str, details: str,
              retry_after_s: float | None = None) -> Error:
    """The exception for a status code; Error itself for one that has none."""
    return _BY_CODE.get(code, Error)(call, target, details, retry_after_s)
