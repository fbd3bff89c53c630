"""Replays whose parts are processes: the same figures, put together from the workers' shares."""

from __future__ import annotations

import dataclasses
import tempfile

import pytest

from cxlbench.devices.profile import CxlHmProfile, load_as
from cxlbench.harness import replay_processes
from cxlbench.harness.deployment import DeploymentError
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.replay import replay
from cxlbench.harness.replay_processes import deployment_of, replay_on_processes, with_seen
from cxlbench.harness.requests import Request
from cxlbench.harness.supervisor import PartFailedError
from cxlbench.harness.worker import RequestRecord
from tests.harness.workbench import spec

WORK = generate(
    GeneratorKnobs(
        sessions=4,
        turns=2,
        shared_system_tokens=128,
        first_input_tokens=512,
        turn_input_tokens=256,
        output_tokens=1,
        think_s=0,
        session_spread_s=0.2,
        seed=3,
    ),
    name="small",
)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Run directories are made in here, where what is left of them would be seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def small(**given):
    return dataclasses.replace(
        spec("cxl-hm", gpu_blocks=0, rig={"workers": 2, "scale": 256}), closed_loop=True, **given
    )


def test_a_replay_on_processes_reads_and_stores_what_one_in_a_process_does(folders):
    wanted = small()
    files = folders / "files"
    result = replay_on_processes(WORK, wanted, deployment_of(wanted.rig), folder=files)
    model = replay(WORK, wanted, wall=False)
    assert result.correct
    assert result.fidelity is not None
    assert result.fidelity.deadlines > 0
    assert {pipe.name for pipe in result.fidelity.pipes} >= {"worker0.nic.rx", "worker1.nic.rx"}
    assert [r.request_id for r in result.records] == list(range(len(WORK.requests)))
    assert {r.worker for r in result.records} == {0, 1}
    ours, models = result.figures, model.figures
    assert ours.requests == models.requests
    assert ours.reusable_blocks == models.reusable_blocks
    assert ours.tier_blocks > 0
    assert ours.stored_blocks > 0
    assert ours.wrong_blocks == ours.failed_loads == ours.failed_stores == 0
    assert all(0 <= r.arrival_s <= r.first_token_s <= r.end_s < 60 for r in result.records)
    assert list(folders.iterdir()) == [files]
    assert list(files.iterdir()) == []


def test_a_worker_that_fails_ends_the_replay_with_its_words_and_leaves_nothing(
    folders, monkeypatch
):
    monkeypatch.setattr(replay_processes, "TASK_FILE", "elsewhere")
    wanted = small()
    with pytest.raises(PartFailedError, match=r"(?s)worker \d ended.*replay\.task"):
        replay_on_processes(WORK, wanted, deployment_of(wanted.rig))
    assert list(folders.iterdir()) == []


def record(request_id: int, *, lookup: float, first_token: float, reusable: int) -> RequestRecord:
    return RequestRecord(
        request_id, 0, 1, 0.0, lookup, lookup, first_token, 9.0, reusable, 0, 0, 0, 0, 1
    )


def test_a_block_counts_as_seen_once_any_worker_had_computed_it():
    prompts = ((1, 2, 3), (1, 5, 6), (1, 2, 7))
    work = dataclasses.replace(
        WORK,
        requests=tuple(
            Request(number, f"s{number}", 1, 0.0, 129 * WORK.block_tokens, 1, block_ids)
            for number, block_ids in enumerate(prompts)
        ),
    )
    found = with_seen(
        work,
        [
            record(0, lookup=0.0, first_token=1.0, reusable=3),
            record(1, lookup=0.5, first_token=2.0, reusable=3),
            record(2, lookup=1.5, first_token=2.0, reusable=3),
        ],
    )
    assert [r.seen for r in found] == [0, 0, 2]


def test_a_profile_with_changes_becomes_a_name_with_the_same_changes():
    device = load_as(
        CxlHmProfile,
        "cxl-hm-prototype",
        overrides={"dram_capacity": "4 GiB", "ssd.read_latency": "120 us", "ssd_count": "4"},
    )
    rig = dataclasses.replace(small().rig, device=device)
    made = deployment_of(rig)
    assert made.load_device() == device
    assert made.device == "cxl-hm-prototype"
    assert made.capacity == rig.device_capacity_bytes


def test_a_device_that_is_a_function_must_be_named():
    rig = dataclasses.replace(small().rig, device=lambda clock, site: None)
    with pytest.raises(DeploymentError, match="module:object"):
        deployment_of(rig)
