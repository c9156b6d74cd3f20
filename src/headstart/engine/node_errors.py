"""What a node tells of its errors: neither where its files are nor what is in them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

from headstart.errors import HeadstartError, MessageError

log = logging.getLogger("headstart")

# From the root of an absolute path to the last slash before the text can no longer be part of it.
_FOLDERS = re.compile(r"(?<![^\s'\"(\[=:,;<`])~?/(?=[^\s/])(?:[^\n:;,'\"()<>`]*/)?")


class StateLostError(MessageError):
    """The node does not have what it was sent, or kept, before."""


class UntoldError(HeadstartError):
    """An error that only the node's own log tells."""

    def __init__(self) -> None:
        super().__init__("the node cannot reply; its own log says why")


@contextmanager
def untold(protected: bool = True) -> Iterator[None]:
    """Where examples are read and computed with, errors are for the node's own log alone: their texts hold values.

    protected: errors about the server's message, too. A server that chooses messages which fail with some examples, and
    not with others, would learn from each which ones are there.
    """
    try:
        yield
    except (StateLostError, UntoldError):
        raise
    except Exception as error:
        if isinstance(error, MessageError) and not protected:
            raise
        log.warning("refused: %s: %s", type(error).__name__, error, exc_info=not isinstance(error, HeadstartError))
        raise UntoldError from None


def without_folders(error: Exception, *known: str) -> str:
    """The text of an error, with the names of files in the place of their paths; all of it goes into the node's log.

    Where a file is tells the server more than it has to know: users, wards, patients. known: paths of the node's own;
    one that is not known ends where a quotation mark does.
    """
    text = str(error)
    if not isinstance(error, UntoldError):  # which is in the log already
        log.warning("refused: %s: %s", type(error).__name__, text)
    given = (getattr(error, "filename", None), getattr(error, "filename2", None))
    for path in sorted((path for path in (*known, *given) if isinstance(path, str)), key=len, reverse=True):
        if PurePath(path).is_absolute():
            text = text.replace(path, PurePath(path).name)
    return _FOLDERS.sub("", text)
