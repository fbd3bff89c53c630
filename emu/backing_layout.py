"""How backing files that stay are laid out, written down beside them.

In another layout nothing that is in the files would be found, and in shorter files it would be cut
off: both are refused before anything is touched. Units: bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cxlbench.emu.status import HostLimitError


@dataclass(frozen=True, slots=True)
class Layout:
    """How an address space lies in files that stay: in another way nothing in them is found."""

    files: int
    stripe_bytes: int
    file_bytes: int

    def check(self, record: Path, files: Sequence[Path]) -> None:
        """Refuse to open what was made in another way, or is longer: it would be lost.

        Raises ``HostLimitError``. Files may grow.
        """
        try:
            made = Layout(**json.loads(record.read_text()))
        except FileNotFoundError:
            longest = max((file.stat().st_size for file in files if file.exists()), default=0)
            made = dataclasses.replace(self, file_bytes=longest)
        except (OSError, ValueError, TypeError) as error:
            raise HostLimitError(
                f"{record} does not say how its files are laid out: {error}"
            ) from error
        same = (made.files, made.stripe_bytes) == (self.files, self.stripe_bytes)
        if not same or made.file_bytes > self.file_bytes:
            raise HostLimitError(
                f"the backing files {files[0]} and so on hold {made}, asked for is {self}: what is "
                "in them would be lost; take the device, capacity and scale that they were made "
                "with, choose another folder, or remove them"
            )

    def save(self, record: Path) -> None:
        """Write it down, whole or not at all."""
        new = record.with_suffix(".layout.new")
        new.write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        new.replace(record)

    def __str__(self) -> str:
        return f"{self.files} x {self.file_bytes} B in stripes of {self.stripe_bytes} B"
