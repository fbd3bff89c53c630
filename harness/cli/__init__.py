"""The command line ``cxlbench``: one file per group of commands.

The modules here import click and little else; what a command needs (numba, matplotlib) is imported
when it runs, so that ``cxlbench --help`` answers at once. ``docs/cli.md`` shows the commands.
"""

from __future__ import annotations

from cxlbench.harness.cli.bench import bench
from cxlbench.harness.cli.bench_models import bench_model, bench_serving
from cxlbench.harness.cli.calibrate import calibrate
from cxlbench.harness.cli.chaos import chaos
from cxlbench.harness.cli.demo import demo
from cxlbench.harness.cli.doctor import doctor
from cxlbench.harness.cli.experiments import compare, list_experiments, report, run
from cxlbench.harness.cli.generate import generate
from cxlbench.harness.cli.group import cxlbench as main
from cxlbench.harness.cli.io import io
from cxlbench.harness.cli.pod import pod
from cxlbench.harness.cli.pod_bench import bench_pod
from cxlbench.harness.cli.pod_fsck import fsck
from cxlbench.harness.cli.pod_long import campaign, stress
from cxlbench.harness.cli.policies import policies
from cxlbench.harness.cli.processes import status, up, worker
from cxlbench.harness.cli.profiles import profiles
from cxlbench.harness.cli.replay import replay
from cxlbench.harness.cli.size import size
from cxlbench.harness.cli.sweep import sweep

for _command in (
    demo,
    list_experiments,
    run,
    compare,
    report,
    replay,
    generate,
    io,
    profiles,
    calibrate,
    bench,
    doctor,
    up,
    worker,
    status,
    chaos,
    pod,
    sweep,
    size,
    policies,
):
    main.add_command(_command)

bench.add_command(bench_pod)
bench.add_command(bench_model)
bench.add_command(bench_serving)
pod.add_command(campaign)
pod.add_command(stress)
pod.add_command(fsck)

__all__ = ["main"]
