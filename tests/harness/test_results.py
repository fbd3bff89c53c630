"""Result folders: what is in them, and that the same run writes the same bytes."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cxlbench.devices.profile import CxlHmProfile, load_as
from cxlbench.emu.status import HostLimitError
from cxlbench.harness.results import (
    Claim,
    RunNotes,
    Verdict,
    to_json,
    to_text,
    without,
    write_run,
)


class Color(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    bytes_per_s: float
    color: Color

    @property
    def gbps(self) -> float:
        return self.bytes_per_s / 1e9


@dataclass(frozen=True)
class Outer:
    inner: Inner
    by_turn: dict[int, tuple[float, ...]]
    _secret: int = 3


def write(folder, **changes):
    given = {"name": "x", "inputs": {"seed": 1, "scale": 2}, "figures": {"hits": 3}, **changes}
    write_run(folder, **given)
    return json.loads((folder / "result.json").read_text())


def test_dataclasses_become_fields_and_properties():
    value = Outer(Inner(2e9, Color.RED), {2: (1.0, 0.5)})
    assert to_json(value) == {
        "inner": {"bytes_per_s": 2e9, "color": "red", "gbps": 2.0},
        "by_turn": {"2": [1.0, 0.5]},
    }


def test_numbers_of_numpy_are_numbers():
    assert to_json({"a": np.float64(0.5), "b": np.arange(2)}) == {"a": 0.5, "b": [0, 1]}


def test_what_json_cannot_say_becomes_text():
    assert to_json([math.inf, math.nan, b"\x01\xff", Path("a/b")]) == ["inf", "nan", "01ff", "a/b"]


def test_sets_are_sorted():
    assert to_json({3, 1, 2}) == [1, 2, 3]


def test_what_has_no_form_in_json_is_refused():
    with pytest.raises(TypeError, match="object has no form in JSON"):
        to_json({"a": object()})


def test_a_profile_keeps_its_numbers_and_their_sources():
    made = to_json(load_as(CxlHmProfile, "cxl-hm-prototype"))
    assert made["dram_capacity"] == 64 << 30
    assert made["ssd"]["provenance"]["read_bandwidth"]["unit"] == "GB/s"
    bare = without(made, "provenance")
    assert "provenance" not in bare["ssd"]
    assert bare["dram_capacity"] == 64 << 30


def test_the_order_of_keys_does_not_matter():
    assert to_text({"b": 1, "a": {"d": 1, "c": 2}}) == to_text({"a": {"c": 2, "d": 1}, "b": 1})


def test_a_folder_has_a_result_without_dates_and_a_run_with_them(tmp_path):
    write(tmp_path / "made", notes=RunNotes(["cxlbench", "demo"], {"out": tmp_path}, 3.5))
    result = json.loads((tmp_path / "made" / "result.json").read_text())
    assert set(result) == {"name", "inputs", "versions", "figures", "claims"}
    assert set(result["versions"]) == {"cxlbench", "python", "numba", "numpy", "xxhash"}
    run = json.loads((tmp_path / "made" / "run.json").read_text())
    assert run["command"] == ["cxlbench", "demo"]
    assert run["duration_s"] == 3.5
    assert run["host"]["cores"] >= 1
    assert run["written"].endswith("Z")


def test_the_same_run_writes_the_same_bytes(tmp_path):
    write(tmp_path / "a", notes=RunNotes(duration_s=1.0))
    write(tmp_path / "b", notes=RunNotes(duration_s=2.0))
    first, second = ((tmp_path / name / "result.json").read_bytes() for name in "ab")
    assert first == second


def test_claims_have_what_the_paper_says_what_was_measured_and_a_verdict(tmp_path):
    claim = Claim(
        statement="prefetch hides the SSDs",
        source="HyMCache fig. 15",
        expected=">= 0.8 of the link",
        measured="0.92",
        verdict=Verdict.HOLDS,
    )
    (row,) = write(tmp_path, claims=[claim])["claims"]
    assert row["verdict"] == "holds"
    assert row["measured"] == "0.92"


def test_a_folder_that_cannot_be_written_is_an_error_of_the_host(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HostLimitError, match=r"cannot write results in .*choose another folder"):
        write(tmp_path / "file" / "below")


def test_a_failed_write_leaves_the_old_result_and_nothing_else(tmp_path, monkeypatch):
    write(tmp_path, figures={"hits": 1})

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(HostLimitError, match="No space left"):
        write_run(tmp_path, name="x", inputs={}, figures={"hits": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "run.json"]
    assert json.loads((tmp_path / "result.json").read_text())["figures"] == {"hits": 1}
