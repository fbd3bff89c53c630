"""The program itself: what happens before a command is there to hear of it."""

from __future__ import annotations

import sys

import pytest

from cxlbench.harness import command


class InterruptedImport:
    def find_spec(self, name, path=None, target=None):
        if name == "cxlbench.harness.cli":
            raise KeyboardInterrupt


def test_ctrl_c_while_the_commands_are_imported_is_no_traceback(monkeypatch):
    import cxlbench.harness

    monkeypatch.delitem(sys.modules, "cxlbench.harness.cli", raising=False)
    monkeypatch.delattr(cxlbench.harness, "cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [InterruptedImport(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == command.INTERRUPTED


def test_it_is_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("cxlbench, version ")
