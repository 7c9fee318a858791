"""The reason why one way of capturing a model does not hold; the next way is tried."""

from __future__ import annotations


class Declined(Exception):
    """One way of capture failed. `where` is the user's file and line, where it is known."""

    def __init__(self, reason: str, where: str | None = None):
        super().__init__(reason)
        self.reason = reason
        self.where = where


def first_line(why: BaseException) -> str:
    """The exception's line that says what happened: TorchScript puts it last, after its own traceback."""
    lines = [line.strip() for line in str(why).splitlines() if line.strip()]
    inner = [line for line in lines if line.startswith("RuntimeError: ")]
    return (inner or lines or [type(why).__name__])[0].removeprefix("RuntimeError: ")
