"""``docs/processes.md``: its commands work in their order, its table is the configuration."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cxlbench.devices.units import Dimension, parse_quantity, to_base
from cxlbench.harness.deployment import DeploymentSpec
from cxlbench.harness.deployment_config import DeploymentError, read_config

PAGE = (Path(__file__).parents[2] / "docs" / "processes.md").read_text()
COMMAND = [sys.executable, "-m", "cxlbench.harness.cli"]


def shown() -> list[list[str]]:
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


def test_the_commands_shown_work_in_their_order(tmp_path):
    first, *others = shown()
    assert first[0] == "up"
    with subprocess.Popen([*COMMAND, *first], cwd=tmp_path, stdout=subprocess.PIPE) as up:
        assert up.stdout is not None
        try:
            assert up.stdout.readline()
            for words in others:
                ran = subprocess.run(
                    [*COMMAND, *words], cwd=tmp_path, capture_output=True, timeout=60, check=False
                )
                # A busy machine that runs tests need not keep the timing.
                assert ran.returncode in ((0, 3) if words[0] == "worker" else (0,)), ran.stderr
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(30)
    assert up.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ssd"]


def test_the_replay_of_a_generated_trace_reads_from_the_tier(tmp_path):
    (generate,) = re.findall(r"`cxlbench (generate [^`]+)`", PAGE)
    (replay,) = re.findall(r"`cxlbench (replay [^`]+)`", PAGE)
    for words, allowed in ((generate, (0,)), (f"{replay} --json", (0, 3))):
        ran = subprocess.run(
            [*COMMAND, *words.split()], cwd=tmp_path, capture_output=True, timeout=90, check=False
        )
        assert ran.returncode in allowed, ran.stderr
    assert json.loads(ran.stdout)["figures"]["tier_blocks"] > 0


def test_the_table_has_every_key_with_its_default():
    rows = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]*) \|", PAGE, re.MULTILINE))
    said = {}
    for names, defaults in rows.items():
        for name, default in zip(re.findall(r"`(\w+)`", names), defaults.split(","), strict=False):
            said[name] = default.strip().strip("`")
    spec = DeploymentSpec()
    assert said.keys() == {field.name for field in dataclasses.fields(spec)}
    for name, text in said.items():
        value = getattr(spec, name)
        if text in ("none", "main memory"):
            assert not value, name
        elif isinstance(value, bool):
            assert text == str(value).lower(), name
        elif name in ("capacity", "block_bytes", "window_bytes"):
            assert to_base(*parse_quantity(text, Dimension.SIZE), Dimension.SIZE) == value, name
        elif isinstance(value, int | float):
            assert float(text) == value, name
        else:
            assert text == str(value), name


def test_the_errors_shown_are_those_of_such_a_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tier.toml").write_text("nodes = 0\nnode = 3\n")
    with pytest.raises(DeploymentError) as refusal:
        read_config(Path("tier.toml"), {}, {"scale": "tiny"})
    (block,) = re.findall(r"^error:\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert sorted(refusal.value.problems) == sorted(line.strip() for line in block.splitlines())
