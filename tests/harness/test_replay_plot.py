"""The plot of a replay: drawn from what was measured, for either clock, and only if asked for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cxlbench.emu.status import HostLimitError
from cxlbench.harness.replay import replay
from cxlbench.harness.replay_plot import plot_replay
from tests.harness.workbench import ask, chat, spec, workload

TIER = ("--workers", "2", "--gpu-blocks", "2", "--capacity", "4GiB")


@pytest.fixture
def drawn(monkeypatch):
    """Keep the figures that are drawn."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figures = []
    close = plt.close
    monkeypatch.setattr(plt, "close", lambda figure: figures.append(figure))
    yield figures
    for figure in figures:
        close(figure)


def draw(tmp_path, work=None, **changes):
    chosen = spec(gpu_blocks=2, **changes)
    result = replay(chat(turns=4) if work is None else work, chosen, wall=False)
    path = plot_replay(result, chosen, tmp_path / "x" / "replay.png", title="a chat")
    return result, path


def test_the_plot_is_a_picture(tmp_path):
    _, path = draw(tmp_path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000


def test_hit_rate_and_bandwidth_are_those_of_the_turns(tmp_path, drawn):
    result, _ = draw(tmp_path)
    hits, reads, _ = drawn[0].axes
    bars = [bar.get_height() for bar in hits.patches]
    turns = result.figures.turns
    for place, turn in enumerate(turns):
        assert bars[place] + bars[place + len(turns)] == pytest.approx(turn.hit_rate * 100)
    assert [bar.get_height() * 1e9 for bar in reads.patches] == pytest.approx(
        [turn.read_bytes_per_s for turn in turns]
    )
    assert [label.get_text() for label in hits.get_xticklabels()] == ["1", "2", "3", "4"]


def test_the_distribution_is_that_of_all_block_reads(tmp_path, drawn):
    result, _ = draw(tmp_path)
    line = drawn[0].axes[2].lines[0]
    took_ms = line.get_xdata()
    assert len(took_ms) == result.figures.block_read.count > 0
    assert np.all(np.diff(took_ms) >= 0)
    assert line.get_ydata()[-1] == 100
    assert np.percentile(took_ms, 90) == pytest.approx(result.figures.block_read.p90_s * 1e3)


def test_real_time_shows_the_emulated_hardware_beside_it(tmp_path, drawn):
    chosen = spec(gpu_blocks=2, rig={"scale": 512})
    result = replay(chat(sessions=2, turns=2, think_s=0.01), chosen, wall=True)
    plot_replay(result, chosen, tmp_path / "replay.png", title="real")
    labels = [line.get_label() for line in drawn[0].axes[2].lines]
    assert labels[:2] == ["really in place", "emulated hardware"]


def test_later_turns_are_one_bar(tmp_path, drawn):
    draw(tmp_path, max_turns=2)
    assert [label.get_text() for label in drawn[0].axes[0].get_xticklabels()] == ["1", "2", ">2"]


def test_a_run_without_a_single_read_is_drawn_too(tmp_path):
    result, path = draw(tmp_path, workload(ask([], tokens=1)))
    assert result.figures.block_read.count == 0
    assert path.exists()


def test_a_device_of_the_users_own_needs_no_name(tmp_path):
    chosen = spec(gpu_blocks=2)
    result = replay(chat(sessions=2, turns=2), chosen, wall=False)
    own = dataclasses.replace(chosen.rig, device=lambda clock, site: None)
    plot_replay(result, dataclasses.replace(chosen, rig=own), tmp_path / "x.png", title="own")
    assert (tmp_path / "x.png").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "x").write_text("in the way")
    with pytest.raises(HostLimitError, match=r"cannot write the plot .*x/replay\.png"):
        draw(tmp_path)


def test_a_replay_draws_it_into_the_folder_that_it_was_given(cli, small_trace, tmp_path):
    ran = cli("replay", small_trace, *TIER, "--out", tmp_path / "out")
    assert ran.code == 0
    assert f"plot: {tmp_path / 'out' / 'replay.png'}" in ran.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "replay.png",
        "result.json",
        "run.json",
    ]


def test_a_replay_that_was_given_no_folder_draws_nothing(cli, small_trace, tmp_path):
    assert "plot" not in cli("replay", small_trace, *TIER).out
    assert sorted(path.name for path in (tmp_path / "results" / "replay").iterdir()) == [
        "result.json",
        "run.json",
    ]
