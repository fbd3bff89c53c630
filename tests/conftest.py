"""What all tests share: deterministic hypothesis, and where the public traces are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "cxlbench",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cxlbench")

LEAST_WORKERS = 5
"""Of pytest-xdist: half of the tests' time is waiting for processes that they started."""


LONG_FILES = (
    "test_pod_installed",
    "test_processes_docs",
    "test_chaos",
    "test_example",
    "test_cli_output_folders",
    "test_demo",
    "test_cli_json",
    "test_cli_processes",
    "test_pod_docs",
    "test_supervisor",
    "test_every_experiment",
    "test_ablations_devices",
    "test_mechanics_of_tiers",
    "test_pod_signals",
    "test_cli_sweep",
)
"""They go first, or the last of them would run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files before all others, files together."""
    place = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many workers ``-n auto`` means."""
    return max(LEAST_WORKERS, os.cpu_count() or 1)


TRACE_HOMES = (
    "the public traces are not here: set CXLBENCH_TRACES to a folder that holds {name} "
    "(docs/traces.md names where each can be had)"
)


@pytest.fixture
def trace_path():
    """Return a function that gives the path of a public trace file, or skips the test."""
    folder = Path(os.environ.get("CXLBENCH_TRACES", Path(__file__).parents[2] / "shared/traces"))

    def find(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            pytest.skip(TRACE_HOMES.format(name=name))
        return path

    return find
