"""A replay: when requests arrive, what they cost; no byte is wrong and nothing is left held."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cxlbench.devices.ssd import SsdArray
from cxlbench.emu.faults import FaultPlan, FaultRule
from cxlbench.emu.status import DeviceError
from cxlbench.harness import replay as replay_module
from cxlbench.harness import rig as rig_module
from cxlbench.harness import serving as serving_module
from cxlbench.harness.content import BlockContent
from cxlbench.harness.replay import part_within, replay
from cxlbench.harness.results import to_text
from cxlbench.harness.rig import Rig
from cxlbench.harness.worker import Worker
from cxlbench.hymcache.connector import HyMCacheConnector
from cxlbench.hymcache.store import StorePath
from tests.harness.workbench import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    DEVICES,
    GIB,
    ask,
    chat,
    engine,
    spec,
    workload,
)

CHAT = chat()
SMALL_SCALE = 512


def virtual(work, spec, **options):
    """Replay in virtual time; whatever happened, no byte is wrong and nothing is held."""
    result = replay(work, spec, wall=False, **options)
    assert result.figures.wrong_blocks == 0
    assert result.figures.held_at_rest == {}
    assert result.correct
    assert len(result.records) == result.figures.requests == len(work.requests)
    return result


def conserved(result, work):
    """Every reusable block was matched, loaded or computed again; returns the blocks computed."""
    again = 0
    for record, request in zip(result.records, work.requests, strict=True):
        assert record.request_id == request.request_id
        new_tokens = request.input_tokens - record.reusable * work.block_tokens
        missed, rest = divmod(record.computed_tokens - new_tokens, work.block_tokens)
        if request.input_tokens:
            assert rest == 0
            assert record.matched + record.loaded + missed == record.reusable
            again += missed
    figures = result.figures
    assert figures.reusable_blocks == figures.gpu_blocks + figures.tier_blocks + again
    assert figures.tier_blocks <= figures.announced_blocks <= figures.looked_up_blocks
    assert (
        figures.gpu_blocks + figures.tier_blocks <= figures.seen_blocks <= figures.reusable_blocks
    )
    return again


# -- hits and data ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEVICES)
def test_every_block_is_matched_loaded_or_computed_again(kind):
    result = virtual(CHAT, spec(kind))
    again = conserved(result, CHAT)
    assert result.figures.gpu_blocks > 0
    assert result.figures.tier_blocks > 0
    assert again > 0  # the first turn at least


@pytest.mark.parametrize("kind", DEVICES)
def test_a_tier_with_room_for_everything_loses_nothing(kind):
    figures = virtual(CHAT, spec(kind, dram_bytes=16 * GIB, gpu_blocks=0)).figures
    assert figures.hit_rate == 1
    assert figures.tier_blocks == figures.seen_blocks > 0
    assert figures.skipped_blocks == figures.evicted_blocks == 0
    assert figures.read_bytes == figures.tier_blocks * BLOCK_BYTES


def test_a_gpu_with_room_for_everything_reads_nothing():
    figures = virtual(CHAT, spec(gpu_blocks=1000)).figures
    # What all sessions share is read once by each worker but the one that computed it.
    assert figures.tier_blocks <= 1
    assert figures.hit_rate == 1


@pytest.mark.parametrize("kind", DEVICES)
def test_prompts_of_no_token_one_token_and_exactly_one_block(kind):
    work = workload(
        ask([], tokens=0, session="a"),
        ask([], tokens=1, session="b"),
        ask([1], tokens=BLOCK_TOKENS, session="c"),
        ask([1], tokens=BLOCK_TOKENS, session="c", turn=2, after=2, think=1.0),
        ask([1], tokens=BLOCK_TOKENS + 1, session="c", turn=3, after=3, think=1.0),
    )
    result = virtual(work, spec(kind, gpu_blocks=0))
    conserved(result, work)
    assert [record.computed_tokens for record in result.records] == [1, 1, 128, 128, 1]
    assert [record.loaded for record in result.records] == [0, 0, 0, 0, 1]
    assert result.figures.stored_blocks == 1


def test_an_empty_workload_is_an_empty_result():
    for closed in (False, True):
        result = virtual(workload(), spec(closed_loop=closed))
        assert result.figures.hit_rate == 0
        assert result.figures.turns == ()


def test_a_full_write_buffer_skips_blocks_and_a_later_turn_stores_them():
    # 1 GiB of DRAM buffers 8 blocks of writes; the first turn of 12 sessions stores 49.
    work = chat(sessions=12, think_s=1.0)
    fast = engine(peak_compute="3120 TFLOP/s")
    figures = virtual(work, spec(dram_bytes=GIB, gpu_blocks=1000, compute=fast)).figures
    assert figures.skipped_blocks > 0
    assert 0 < figures.recovered_blocks <= figures.skipped_blocks
    assert figures.failed_stores == 0


def test_a_full_device_evicts_and_is_still_right():
    result = virtual(CHAT, spec(capacity_bytes=GIB, gpu_blocks=0))
    conserved(result, CHAT)
    assert result.figures.evicted_blocks > 0
    assert 0 < result.figures.hit_rate < 1


def test_another_blocks_bytes_called_a_hit_make_the_run_not_correct(monkeypatch):
    class Swapping(HyMCacheConnector):
        def submit_load(self, request_id, keys, buffers):
            return super().submit_load(request_id, keys, buffers[::-1])

    monkeypatch.setattr(rig_module, "HyMCacheConnector", Swapping)
    for wall in (False, True):
        work = chat(sessions=1, turns=2, blocks=2, think_s=0.05)
        # The chains are blocks 0, 1, 2 and 0 ... 4: of three loaded, the middle one is in place.
        result = replay(work, spec(gpu_blocks=0, rig={"scale": SMALL_SCALE}), wall=wall)
        assert result.figures.wrong_blocks == 2
        assert not result.correct
        assert result.figures.held_at_rest == {}


@pytest.mark.parametrize("scale", [3, 100, 333.3, 4096])
@pytest.mark.parametrize("kind", DEVICES)
def test_any_scale_replays(kind, scale):
    """Also one that does not divide a block into whole pages or words."""
    work = chat(sessions=2, turns=2, think_s=0.02)
    for wall in (False, scale > 1000 or (scale == 100 and kind == "cxl-hm")):
        result = replay(work, spec(kind, gpu_blocks=0, rig={"scale": scale}), wall=wall)
        assert result.correct
        assert result.figures.tier_blocks == result.figures.seen_blocks == 8
        assert result.figures.read_bytes == pytest.approx(8 * BLOCK_BYTES, rel=1e-3)


def test_something_held_makes_the_run_not_correct(monkeypatch):
    monkeypatch.setattr(Rig, "at_rest", lambda self: {"leases": 1})
    result = replay(workload(ask([1])), spec(), wall=False)
    assert result.figures.held_at_rest == {"leases": 1}
    assert not result.correct


@pytest.mark.parametrize("kind", ["cxl-hm", "cmm-h"])
def test_a_chain_stays_on_one_device(kind, monkeypatch):
    """Whether its earlier blocks were matched in the GPU or loaded from the tier."""
    homes: list[set[tuple[int, int]]] = []
    work = chat(sessions=6, turns=4)
    chains = [requests[-1].block_ids[1:] for requests in work.sessions().values()]
    work = workload(
        *[
            ask(
                request.block_ids[1:],  # without what all sessions share
                session=request.session,
                turn=request.turn,
                at=request.arrival_s,
                think=request.think_s,
                after=request.after,
            )
            for request in work.requests
        ]
    )
    keys_of = {}

    class Watched(Rig):
        async def quiesce(self):
            await super().quiesce()
            for chain in chains:
                found = self.master.lookup("test", [keys_of[block] for block in chain]).blocks
                assert sum(block is not None for block in found) >= len(chain) - 1
                homes.append({(b.node, b.device) for b in found if b is not None})
            self.master.release("test")

    class Noting(Worker):
        async def serve(self, request):
            keys_of.update(zip(request.block_ids, self._keys_of(request), strict=True))
            return await super().serve(request)

    monkeypatch.setattr(replay_module, "Rig", Watched)
    monkeypatch.setattr(serving_module, "Worker", Noting)
    for gpu_blocks in (0, 6, 1000):
        homes.clear()
        virtual(work, spec(kind, gpu_blocks=gpu_blocks, rig={"nodes": 2, "devices_per_node": 2}))
        assert [len(home) for home in homes] == [1] * 6
        assert len(set().union(*homes)) > 1


# -- arrivals -----------------------------------------------------------------------------------

SLOW = engine(peak_compute="2 TFLOP/s")
"""A prompt of one block takes two seconds."""


def test_an_open_loop_arrives_at_trace_times_whatever_the_system_does():
    work = workload(*[ask([n], session=f"s{n}", at=0.25 * n) for n in range(8)])
    for speed in (1.0, 2.5):
        result = virtual(work, spec(closed_loop=False, speed=speed, max_running=1, compute=SLOW))
        assert [record.arrival_s for record in result.records] == pytest.approx(
            [0.25 * n / speed for n in range(8)]
        )
        assert result.records[-1].ttft_s > 5


def test_a_closed_loop_waits_for_the_predecessor_and_thinks():
    work = workload(
        ask([1], out=21),
        ask([1, 2], turn=2, think=0.75, after=0),
        ask([1, 2, 3], turn=3, think=0.5, after=1),
    )
    one, two, three = virtual(work, spec()).records
    assert two.arrival_s == pytest.approx(one.end_s + 0.75)
    assert three.arrival_s == pytest.approx(two.end_s + 0.5)


def test_think_times_are_capped_and_sped_up():
    work = workload(ask([1]), ask([1, 2], turn=2, think=3600, after=0))
    one, two = virtual(work, spec(think_cap_s=10, speed=4)).records
    assert two.arrival_s == pytest.approx(one.end_s + 2.5)


def test_first_turns_of_a_closed_loop_arrive_at_their_times():
    work = workload(ask([1], session="a", at=0.5), ask([2], session="b", at=3.0))
    for speed in (1, 2):
        records = virtual(work, spec(speed=speed)).records
        assert [record.arrival_s * speed for record in records] == pytest.approx([0.5, 3.0])


def test_two_that_wait_for_one_both_arrive():
    work = workload(
        ask([1]),
        ask([1, 2], turn=2, think=1, after=0),
        ask([1, 3], turn=2, think=2, after=0),
    )
    one, two, three = virtual(work, spec()).records
    assert two.arrival_s == pytest.approx(one.end_s + 1)
    assert three.arrival_s == pytest.approx(one.end_s + 2)


def test_sessions_stay_on_their_worker():
    records = virtual(CHAT, spec(rig={"workers": 3})).records
    homes: dict[str, set[int]] = {}
    for record, request in zip(records, CHAT.requests, strict=True):
        homes.setdefault(request.session, set()).add(record.worker)
    assert [len(home) for home in homes.values()] == [1] * 8
    assert set().union(*homes.values()) == {0, 1, 2}


def test_requests_without_sessions_go_to_the_workers_in_turn():
    work = workload(*[ask([n], session=f"s{n}") for n in range(6)], sessions=False)
    records = virtual(work, spec(closed_loop=False, rig={"workers": 3})).records
    assert [record.worker for record in records] == [0, 1, 2, 0, 1, 2]


def test_progress_counts_every_request_once():
    seen = []
    virtual(CHAT, spec(), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(n + 1, 32) for n in range(32)]


def test_the_part_of_a_workload_that_is_over_within_a_budget():
    work = workload(*[ask([n], session=f"s{n}") for n in range(4)])
    ends = {0: 1.0, 1: 9.0, 2: 2.0, 3: 3.0}
    part = part_within(work, ends, 8.0)
    assert [request.session for request in part.requests] == ["s0", "s2", "s3"]
    assert [request.request_id for request in part.requests] == [0, 1, 2]
    assert part_within(work, ends, 9.0) == work
    assert [request.session for request in part_within(work, ends, 0.5).requests] == ["s0"]


def test_a_part_keeps_who_waits_for_whom():
    ends = {request.request_id: float(request.turn) for request in CHAT.requests}
    part = part_within(CHAT, ends, 2.0)
    assert {request.turn for request in part.requests} == {1, 2}
    for request in part.requests:
        if request.turn == 2:
            assert request.after is not None
            assert part.requests[request.after].session == request.session


# -- faults -------------------------------------------------------------------------------------

PLANS = {
    "read errors": [FaultRule(point="ssd.read", kind="error", probability=0.1)],
    "bit rot": [FaultRule(point="ssd.read", kind="corrupt", probability=0.1)],
    "write errors": [
        FaultRule(point="ssd.write", kind="error", probability=0.1),
        FaultRule(point="ssd.write", kind="short", probability=0.1),
    ],
    "port down": [
        FaultRule(point="fabric.read", kind="down", probability=0.1),
        FaultRule(point="fabric.write", kind="down", probability=0.1),
    ],
    "bad wire": [FaultRule(point="fabric.read", kind="corrupt", probability=0.1)],
    "control down": [FaultRule(point="control", kind="down", probability=0.1)],
    "late": [
        FaultRule(point="ssd.read", kind="delay", delay_s=1.5, probability=0.03),
        FaultRule(point="fabric.read", kind="delay", delay_s=1.5, probability=0.03),
        FaultRule(point="fabric.write", kind="delay", delay_s=1.5, probability=0.03),
        FaultRule(point="control", kind="delay", delay_s=1.5, probability=0.03),
    ],
    "everything": [
        FaultRule(point="ssd.read", kind="error", probability=0.03),
        FaultRule(point="ssd.read", kind="corrupt", probability=0.03),
        FaultRule(point="ssd.read", kind="delay", delay_s=1.5, probability=0.02),
        FaultRule(point="ssd.write", kind="short", probability=0.1),
        FaultRule(point="fabric.read", kind="down", probability=0.03),
        FaultRule(point="fabric.read", kind="corrupt", probability=0.03),
        FaultRule(point="fabric.write", kind="down", probability=0.03),
        FaultRule(point="control", kind="down", probability=0.03),
        FaultRule(point="control", kind="delay", delay_s=1.5, probability=0.02),
    ],
}
IMPATIENT = {"deadline_s": 1.0, "nodes": 2}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["cxl-hm", "cmm-h"])
def test_no_fault_gives_wrong_data_or_leaves_anything_held(kind, plan, seed):
    """Two nodes, devices too small for all and DRAM for half of that, a deadline of 1 s."""
    faults = FaultPlan(tuple(PLANS[plan]), seed)
    size = spec(kind, dram_bytes=GIB // 2, capacity_bytes=GIB, gpu_blocks=2, rig=IMPATIENT)
    result = virtual(CHAT, size, faults=faults)
    conserved(result, CHAT)
    assert sum(result.figures.injected.values()) > 0


def test_blocks_that_come_too_late_are_computed_and_the_request_ends():
    late = FaultPlan((FaultRule(point="ssd.read", kind="delay", delay_s=60.0),))
    work = chat(sessions=2, turns=2, think_s=2.0)
    result = virtual(work, spec(gpu_blocks=0, rig={"deadline_s": 3.0}), faults=late)
    conserved(result, work)
    assert result.figures.timed_out_blocks > 0
    waited = [record for record in result.records if record.found > record.loaded]
    assert waited
    for record in waited:
        assert record.load_s - record.lookup_s == pytest.approx(3.0)
        assert record.first_token_s > record.load_s


def test_a_block_that_rotted_is_a_miss_and_a_count():
    rot = FaultPlan((FaultRule(point="ssd.read", kind="corrupt", limit=3),))
    figures = virtual(CHAT, spec(gpu_blocks=0), faults=rot).figures
    assert figures.mismatched_blocks == 3
    assert figures.hit_rate < 1


# -- errors -------------------------------------------------------------------------------------


class BoomError(Exception):
    """A bug."""


def boom(*_args, **_kwargs):
    raise BoomError


@pytest.mark.parametrize("closed", [False, True])
def test_a_request_that_crashes_ends_the_run_at_once_with_its_error(monkeypatch, closed):
    """Also while earlier requests are still running."""
    started = []

    class Crashing(Worker):
        async def serve(self, request):
            started.append(request.request_id)
            if request.request_id == 1:
                boom()
            return await super().serve(request)

    monkeypatch.setattr(serving_module, "Worker", Crashing)
    work = workload(*[ask([n], session=f"s{n}", at=float(n), out=1000) for n in range(4)])
    with pytest.raises(BoomError):
        replay(work, spec(closed_loop=closed), wall=False)
    assert started == [0, 1]


def test_a_store_that_crashes_ends_the_run_with_its_error(monkeypatch):
    monkeypatch.setattr(StorePath, "_write_block", boom)
    with pytest.raises(BoomError):
        replay(CHAT, spec(), wall=False)


@pytest.mark.parametrize("kind", ["cxl-hm", "cmm-h"])
@pytest.mark.usefixtures("leaks_on_purpose")  # a device that has crashed keeps what it held
def test_a_flush_that_crashes_ends_the_run_with_its_error(monkeypatch, kind):
    monkeypatch.setattr(SsdArray, "write", boom)
    with pytest.raises(BoomError):
        replay(CHAT, spec(kind), wall=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [("speed", 0), ("max_running", 0), ("gpu_blocks", -1), ("think_cap_s", -1), ("max_turns", 0)],
)
def test_impossible_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} must .*got {value}"):
        spec(**{field: value})


def test_a_replay_that_is_refused_leaves_nothing(tmp_path):
    """A device larger than its SSDs: neither files nor threads nor an open loop."""
    wrong = spec(capacity_bytes=5000 * GIB, rig={"scale": SMALL_SCALE})
    with pytest.raises(DeviceError, match="its 2 SSDs have"):
        replay(CHAT, wrong, wall=True, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert gc.isenabled()


# -- determinism --------------------------------------------------------------------------------


def as_text(kind: str) -> str:
    """Return a whole result as text."""
    faults = FaultPlan(tuple(PLANS["everything"]), 5)
    result = replay(
        CHAT, spec(kind, dram_bytes=GIB, gpu_blocks=2, rig=IMPATIENT), wall=False, faults=faults
    )
    return to_text({"figures": result.figures, "records": result.records})


@pytest.mark.parametrize("kind", DEVICES)
def test_the_same_seed_gives_the_same_result_twice(kind):
    assert as_text(kind) == as_text(kind)


def test_the_result_does_not_depend_on_hash_seeds():
    code = (
        "from tests.harness.test_replay import as_text; print(as_text('cxl-hm'), as_text('cmm-h'))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            timeout=60,
        ).stdout
        for seed in ("1", "77")
    ]
    assert printed[0] == printed[1]
    assert len(printed[0]) > 10_000


# -- real time ----------------------------------------------------------------------------------

CALM = chat(sessions=2, turns=3, think_s=0.1)
LOGICAL = ("turn", "worker", "reusable", "seen", "matched", "found", "loaded", "computed_tokens")


def logical(result):
    return [[getattr(record, name) for name in LOGICAL] for record in result.records]


def real(work, folder=None, *, gpu_blocks=2):
    chosen = spec(gpu_blocks=gpu_blocks, rig={"scale": SMALL_SCALE})
    return replay(work, chosen, wall=True, folder=folder)


def test_real_bytes_in_real_time_come_to_the_same_as_the_model():
    wall = real(CALM)
    model = virtual(CALM, spec(gpu_blocks=2, rig={"scale": SMALL_SCALE}))
    assert wall.correct
    assert logical(wall) == logical(model)
    for name in ("stored_blocks", "skipped_blocks", "tier_blocks", "read_bytes", "hit_rate"):
        assert getattr(wall.figures, name) == getattr(model.figures, name)
    assert wall.figures.tier_blocks > 0
    assert wall.fidelity is not None
    assert wall.fidelity.deadlines > 0
    assert model.fidelity is None


def test_real_files_are_verified_and_gone_afterwards(tmp_path, monkeypatch):
    """Small DRAM: what was flushed is read back from the files."""
    sizes = []
    quiesce = Rig.quiesce

    async def measured(self):
        await quiesce(self)
        sizes.extend(path.stat().st_blocks * 512 for path in self.folder.iterdir())

    monkeypatch.setattr(Rig, "quiesce", measured)
    result = real(CALM, tmp_path, gpu_blocks=0)
    assert result.correct
    assert result.figures.tier_blocks > 0
    assert sum(sizes) >= result.figures.stored_blocks * BLOCK_BYTES // SMALL_SCALE
    assert list(tmp_path.iterdir()) == []
    assert no_threads()


def no_threads() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("cxlbench-io")]


def interrupt(*_args):
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("bang", "error"), [(boom, BoomError), (interrupt, KeyboardInterrupt)])
def test_files_are_gone_after_an_error_and_after_ctrl_c(tmp_path, monkeypatch, bang, error):
    """In the middle of the run, with work under way."""
    folders = []

    def third_fails(content, buffer, key):
        folders.append(list(tmp_path.iterdir()))
        if len(folders) == 3:
            bang()
        return True

    monkeypatch.setattr(BlockContent, "holds", third_fails)
    with pytest.raises(error):
        real(CALM, tmp_path, gpu_blocks=0)
    assert len(folders) >= 3
    assert folders[0] != []
    assert list(tmp_path.iterdir()) == []
    assert no_threads()
    assert gc.isenabled()


def test_full_size_figures_do_not_depend_on_the_scale():
    """A footer takes a page at every scale, and the time of a page of the full-size system."""

    def read_p50(scale):
        result = replay(
            chat(sessions=4), spec("cxl-hm", gpu_blocks=0, rig={"scale": scale}), wall=False
        )
        assert result.correct
        return result.figures.block_read.p50_s

    full = read_p50(1)
    for scale in (64, 512):
        assert read_p50(scale) == pytest.approx(full, rel=0.02)
