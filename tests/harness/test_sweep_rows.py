"""The file of a sweep: torn ends are dropped, other sweeps' files refused, nobody shares one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness import sweep_rows, sweep_writer
from cxlbench.harness.sweep_axes import SweepError, make_design
from cxlbench.harness.sweep_rows import (
    MOST_GROUPS,
    PointResult,
    PointRow,
    make_header,
    read_sweep,
    summarize_rows,
)
from cxlbench.harness.sweep_writer import SweepWriter
from tests.harness.toy_experiment import EXPERIMENT


def header(*sets, quick=False, seed=0):
    design = make_design(EXPERIMENT, sets=sets or ("sessions=1,2,3",), quick=quick, seed=seed)
    return make_header(EXPERIMENT, design, quick=quick, seed=seed)


def row(point, **more):
    return PointRow(point=point, keys={"sessions": str(point + 1)}, result=PointResult(**more))


HEADER = header()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "toy.jsonl"


@pytest.fixture
def two_rows(path):
    with SweepWriter(path, header()) as writer:
        writer.append(row(0))
        writer.append(row(2))
    return path


def test_what_was_written_is_read_and_the_rest_is_to_do(two_rows):
    with SweepWriter(two_rows, header()) as writer:
        assert list(writer.todo()) == [1]
    assert [one.point for one in read_sweep(two_rows).rows] == [0, 2]


@given(st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_gone_on_with(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "toy.jsonl"
    with SweepWriter(path, HEADER) as writer:
        for point in range(3):
            writer.append(row(point))
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    kept = max(0, path.read_bytes().count(b"\n") - 1)
    with SweepWriter(path, HEADER) as writer:
        assert list(writer.todo()) == list(range(kept, 3))
        for point in list(writer.todo()):
            writer.append(row(point))
    assert path.read_bytes() == whole


def test_zeros_at_the_end_of_a_file_are_a_torn_line(two_rows):
    whole = two_rows.read_bytes()
    two_rows.write_bytes(whole + b"\0" * 100)
    with SweepWriter(two_rows, header()):
        pass
    assert two_rows.read_bytes() == whole


def test_damage_before_the_last_line_is_refused(two_rows):
    lines = two_rows.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:20] + b"\n"
    two_rows.write_bytes(b"".join(lines))
    with pytest.raises(SweepError, match="line 2 is damaged"):
        read_sweep(two_rows)


def test_a_row_of_a_point_that_there_is_not_is_refused(two_rows):
    raw = json.loads(two_rows.read_text().splitlines()[1])
    with two_rows.open("a") as file:
        file.write(json.dumps({**raw, "point": 3}) + "\n")
    with pytest.raises(SweepError, match="of point 3; there are 3"):
        read_sweep(two_rows)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (header(seed=1), "with the seed 0, this one has 1"),
        (header(quick=True), "with quick False, this one has True"),
        (header("sessions=1,2"), "with so many points: 3, this one has 2"),
        (header("share=0.1,0.2,0.3"), "over the keys sessions, this one has share"),
        (header("sessions=1,2,4"), "over other values of its keys"),
    ],
)
def test_the_file_of_another_sweep_is_refused_with_what_differs_and_kept(two_rows, other, said):
    before = two_rows.read_bytes()
    with pytest.raises(SweepError, match=said):
        SweepWriter(two_rows, other)
    assert two_rows.read_bytes() == before


def test_a_set_up_that_changed_is_refused(two_rows, monkeypatch):
    monkeypatch.setattr(sweep_rows, "setup_hash", lambda experiment, *, quick: "changed")
    with pytest.raises(SweepError, match="another set-up of the experiment"):
        SweepWriter(two_rows, header())


def test_another_version_is_refused(two_rows, monkeypatch):
    monkeypatch.setattr(sweep_rows, "versions", lambda: {"cxlbench": "9"})
    with pytest.raises(SweepError, match=r"made by cxlbench 0\.1.*, this one has cxlbench 9"):
        SweepWriter(two_rows, header())


@pytest.mark.parametrize("content", [b"my thesis", b"my thesis\n", b"{}\n"])
def test_a_file_that_is_no_sweeps_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "thesis"
    path.write_bytes(content)
    with pytest.raises(SweepError, match="not the file of a sweep"):
        SweepWriter(path, header())
    assert path.read_bytes() == content


def test_two_sweeps_do_not_write_one_file(two_rows):
    with (
        SweepWriter(two_rows, header()),
        pytest.raises(SweepError, match="another sweep is writing"),
    ):
        SweepWriter(two_rows, header())


def test_each_row_is_on_the_disk_before_the_next(path, monkeypatch):
    synced = []
    monkeypatch.setattr(sweep_writer.os, "fsync", lambda number: synced.append(number))
    with SweepWriter(path, header()) as writer:
        before = len(synced)
        writer.append(row(0))
        assert len(synced) == before + 1
        assert len(read_sweep(path).rows) == 1


def test_sorting_puts_rows_into_the_order_of_points_and_keeps_the_last_of_each(path):
    with SweepWriter(path, header()) as writer:
        writer.append(row(2))
        writer.append(row(0, error="lost", lost=True))
        assert list(writer.todo()) == [0, 1]
        writer.append(row(0))
        writer.append(row(1))
        writer.sort()
    points = [json.loads(line)["point"] for line in path.read_text().splitlines()[1:]]
    assert points == [0, 1, 2]
    assert not any(one.result.lost for one in read_sweep(path).rows)
    assert [one.name for one in path.parent.iterdir()] == ["toy.jsonl"]


def test_a_file_that_is_not_there_is_said_so(path):
    with pytest.raises(SweepError, match="cannot read"):
        read_sweep(path)


def test_rows_are_summarized_by_their_texts():
    rows = [
        {"system": "a", "hit": 0.25, "ok": True},
        {"system": "a", "hit": 0.75, "ok": True},
        {"system": "b", "hit": None, "ok": False},
    ]
    assert summarize_rows(rows) == [
        {"system": "a", "ok": True, "hit": 0.5},
        {"system": "b", "ok": False, "hit": None},
    ]


def test_of_too_many_groups_the_first_column_alone_decides():
    rows = [{"system": "ab"[n % 2], "request": f"r{n}", "x": n} for n in range(2 * MOST_GROUPS)]
    assert summarize_rows(rows) == [
        {"system": "a", "request": None, "x": MOST_GROUPS - 1},
        {"system": "b", "request": None, "x": MOST_GROUPS},
    ]


def test_no_rows_are_summarized_as_none():
    assert summarize_rows([]) == []


def test_a_full_disk_is_told_and_the_rows_before_are_kept(two_rows, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    with SweepWriter(two_rows, header()) as writer:
        monkeypatch.setattr(sweep_writer.os, "fsync", full)
        with pytest.raises(SweepError, match=r"cannot write .*toy.jsonl: No space left"):
            writer.append(row(1))
    assert {0, 2} <= {one.point for one in read_sweep(two_rows).rows}
