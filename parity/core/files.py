"""Files that are whole at any time: what a reader finds is the old content or the new."""

import contextlib
import errno
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Writes the bytes, of a text those of UTF-8, whatever the locale, beside the file, and puts it in the file's place
    when the disk has all of it. Returns the path. OSError, naming the file: it could not be written, and is as it was;
    or it is there and is no regular file, as C's td_replacement_open refuses it."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        try:
            # O_EXCL follows no link. A file that an earlier process of the same number left is removed.
            beside.unlink(missing_ok=True)
            file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with open(file, "wb") as whole:
                whole.write(data)
                whole.flush()
                os.fsync(file)
            beside.replace(path)
        except BaseException:  # an interrupt as well
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path
