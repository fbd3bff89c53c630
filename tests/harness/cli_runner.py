"""Runs the command line in this process, as a shell would see it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cxlbench.harness.cli import main


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Cli:
    """``cli("replay", path, "--json")``; bugs keep their traceback."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *args: str | Path) -> Ran:
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args], prog_name="cxlbench")
        out, err = self._capfd.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Ran(code or 0, out, err)
