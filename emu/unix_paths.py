"""Unix sockets at paths of any length.

The system takes about a hundred bytes of path for a Unix socket, and folders of users and tests are
often longer. Where there is ``/proc/self/fd`` (Linux) a long path is reached through its folder,
held open: the socket is where it was asked for, and only this process calls it by another name.
Elsewhere a long path is refused. Units: bytes.

Left out: a folder that is removed and made again while a connection lives; a client with a long
path that outlives it must be started again.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Self

UNIX = "ipc://"
MAX_PATH_BYTES = 103
"""What every system takes: Linux 107, macOS 103."""
SHORTCUT = Path("/proc/self/fd")


def takes_any_length() -> bool:
    """Whether long paths can be served here."""
    return SHORTCUT.is_dir()


def fits(endpoint: str) -> bool:
    """Whether an endpoint is no Unix socket, or one at a path that every system takes."""
    path = endpoint.removeprefix(UNIX)
    return path == endpoint or len(os.fsencode(path)) <= MAX_PATH_BYTES


class Door:
    """An endpoint under a name that sockets take, for as long as this is open.

    Endpoints that are no Unix sockets, or short ones, are what they are. Raises ``OSError`` if the
    folder of a long path is not there, or the system has no way to reach it.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._folder = -1
        path = endpoint.removeprefix(UNIX)
        if fits(endpoint):
            return
        if not takes_any_length():
            raise OSError(
                errno.ENAMETOOLONG,
                f"the path of a Unix socket has at most {MAX_PATH_BYTES} B here",
                path,
            )
        folder, name = os.path.split(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._folder = os.open(folder, flags)
        self.endpoint = f"{UNIX}{SHORTCUT}/{self._folder}/{name}"

    @property
    def path(self) -> str:
        """The path of a Unix socket."""
        return self.endpoint.removeprefix(UNIX)

    def close(self) -> None:
        """Let go of the folder."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
