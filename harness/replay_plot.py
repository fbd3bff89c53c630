"""The plot of one replay: hit rate and read bandwidth by turn, and how long block reads took.

Blocks that the GPU still had and blocks that the tier delivered are stacked, as shares of those
computed before. In real time the dashes say when the emulated hardware had the bytes.
Sizes and bandwidths are at full size.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from cxlbench.emu.status import HostLimitError
from cxlbench.harness.metrics import OTHER_TURNS
from cxlbench.harness.replay import ReplayResult, ReplaySpec

GPU, TIER, MODEL = "#bdbdbd", "#2166ac", "#b2182b"
PERCENTILES = (50, 90, 99)


def plot_replay(result: ReplayResult, spec: ReplaySpec, path: Path, *, title: str) -> Path:
    """Draw a finished replay into ``path`` (PNG) and return it.

    Raises:
        HostLimitError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figures = result.figures
    turns = figures.turns
    names = [f">{spec.max_turns}" if turn.turn == OTHER_TURNS else str(turn.turn) for turn in turns]
    places = np.arange(len(turns))
    figure, (hits, reads, times) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    try:
        seen = np.asarray([max(turn.seen_blocks, 1) for turn in turns], dtype=float)
        gpu = np.asarray([turn.gpu_blocks for turn in turns]) / seen * 100
        tier = np.asarray([turn.tier_blocks for turn in turns]) / seen * 100
        hits.bar(places, gpu, color=GPU, label="GPU")
        hits.bar(places, tier, bottom=gpu, color=TIER, label="tier")
        hits.set(title="Blocks not computed again", xlabel="turn", ylabel="% of those seen before")
        hits.set_ylim(0, 105)
        hits.legend(fontsize=8, loc="lower right", framealpha=0.9)
        reads.bar(places, [turn.read_bytes_per_s / 1e9 for turn in turns], color=TIER)
        reads.set(title="Read bandwidth of the tier", xlabel="turn", ylabel="GB/s")
        for axes in (hits, reads):
            axes.set_xticks(places, names)
        took_ms = np.sort(result.blocks.latencies_s()) * 1e3
        times.set(
            title=f"{len(took_ms):,} block reads", xlabel="latency, ms (log)", ylabel="% of blocks"
        )
        if len(took_ms):
            share = np.arange(1, len(took_ms) + 1) / len(took_ms) * 100
            times.plot(took_ms, share, color=TIER, label="really in place")
            if result.fidelity is not None:
                due_ms = np.sort(result.blocks.due_latencies_s()) * 1e3
                times.plot(due_ms, share, "--", color=MODEL, label="emulated hardware")
            for percentile in PERCENTILES:
                at = float(np.percentile(took_ms, percentile))
                times.plot([at], [percentile], "o", color=TIER, markersize=4)
                times.annotate(
                    f"p{percentile} {at:.3g} ms",
                    (at, percentile),
                    xytext=(6, -10) if percentile <= 50 else (-6, -3),  # beside the curve, inside
                    textcoords="offset points",
                    ha="left" if percentile <= 50 else "right",
                    fontsize=8,
                )
            times.set_xscale("log")
            times.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            times.xaxis.set_major_formatter("{x:g}")
            times.xaxis.set_minor_formatter(NullFormatter())
            if result.fidelity is not None:
                times.legend(fontsize=8, loc="upper left", framealpha=0.9)
        times.set_ylim(0, 103)
        for axes in (hits, reads, times):
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        clock = "virtual time" if result.fidelity is None else "real time, real bytes"
        device = getattr(spec.rig.device, "name", None) or "a device of the user's own"
        figure.suptitle(f"{title} on {device}: {figures.requests:,} requests, {clock}", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise HostLimitError(
            f"cannot write the plot {path}: {error.strerror or error}; choose another folder"
        ) from error
    finally:
        plt.close(figure)
    return path
