"""A rig: what it builds from a spec, at which scale, what it reports as held, what it leaves."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from cxlbench.devices.profile import LinkProfile, ScaleError, load_as
from cxlbench.emu.clock import VirtualClock, WallClock
from cxlbench.emu.memory import PhantomBuffer
from cxlbench.emu.status import DeviceError, HostLimitError
from cxlbench.harness import rig as rig_module
from cxlbench.harness.rig import BlockTooLargeError, Rig
from cxlbench.kv.footer import object_extent_bytes
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.kv.payload import ObjectTag
from cxlbench.kv.results import KeyResult
from tests.harness.workbench import BLOCK_BYTES, DEVICES, GIB, device, spec

SPACE = Namespace("model", "revision", "bfloat16", "layout", 128)
KEYS = trace_keys(SPACE, range(4))


def spec_of(kind: str = "cxl-hm", **fields):
    return spec(kind, rig=fields).rig


def in_virtual_time(spec, work, **options):
    """Build a rig, run ``work(rig)`` on it, and close it."""
    with VirtualClock() as clock:
        rig = Rig(clock, spec, phantom=True, **options)

        async def all_of_it():
            try:
                return await work(rig)
            finally:
                await rig.close()

        return clock.run(all_of_it())


async def store_and_load(rig: Rig, worker: int = 0) -> list[KeyResult]:
    """Store a chain by one worker and load it by the same; return what became of each block."""
    connector = rig.connectors[worker]
    source = [PhantomBuffer(rig.block_bytes, ObjectTag.of(key)) for key in KEYS]
    await connector.submit_store(1, KEYS, source).done.wait()
    await connector.submit_lookup(2, KEYS, rig.block_bytes).done.wait()
    into = [PhantomBuffer(rig.block_bytes) for _ in KEYS]
    done = await connector.submit_load(2, KEYS, into).done.wait()
    connector.release(2)
    assert [buffer.tag for buffer in into] == [buffer.tag for buffer in source]
    await rig.quiesce()
    await rig.clock.sleep(0.01)
    return list(done.results)


@pytest.mark.parametrize("kind", DEVICES)
def test_each_kind_of_device_keeps_blocks_and_ends_with_nothing_held(kind):
    async def work(rig):
        assert rig.at_rest() == {}
        assert await store_and_load(rig) == [KeyResult.HIT] * 4
        return rig.at_rest()

    assert in_virtual_time(spec_of(kind), work) == {}


def test_a_rig_has_the_nodes_devices_and_connectors_of_its_spec():
    async def work(rig):
        names = [device.name for node in rig.nodes.values() for device in node.devices]
        assert names == ["node0.dev0", "node0.dev1", "node1.dev0", "node1.dev1"]
        assert len(rig.connectors) == 3
        assert rig.fabric.registered == 4

    in_virtual_time(spec_of(nodes=2, devices_per_node=2, workers=3), work)


def test_fidelity_sees_every_link_and_port():
    async def work(rig):
        return [pipe.name for pipe in rig.pipes]

    assert sorted(in_virtual_time(spec_of(nodes=2, workers=1), work)) == [
        *("node0.dev0.port", "node0.nic.rx", "node0.nic.tx"),
        *("node1.dev0.port", "node1.nic.rx", "node1.nic.tx"),
        *("worker0.nic.rx", "worker0.nic.tx"),
    ]


def test_what_the_links_limit_holds_between_a_worker_and_a_node():
    """Latencies add up, the smaller number of outstanding READs counts, and messages cost."""
    fast = dataclasses.replace(
        load_as(LinkProfile, "nic-200g"), latency=1e-6, outstanding_reads=8, message_overhead=1e-3
    )
    slow = dataclasses.replace(load_as(LinkProfile, "nic-100g"), latency=2e-6, outstanding_reads=5)

    async def work(rig):
        pair = rig.connectors[0].nodes[0].queue_pair
        assert pair.latency_s == pytest.approx(3e-6)
        assert pair.reads.capacity == 5
        await store_and_load(rig)
        assert 1 <= pair.reads.peak <= 5
        links = {pipe.name: pipe for pipe in rig.pipes}
        sent = links["node0.nic.tx"]
        assert sent.busy_s == pytest.approx(sent.moved_bytes / sent.bytes_per_s + 4e-3)
        for way in ("node0.nic.tx", "worker0.nic.rx"), ("worker0.nic.tx", "node0.nic.rx"):
            assert len({links[name].moved_bytes for name in way}) == 1
            assert links[way[0]].moved_bytes >= 4 * BLOCK_BYTES

    in_virtual_time(spec_of(node_link=fast, worker_link=slow), work)


def test_scale_divides_bytes_and_bandwidths():
    async def sizes(rig):
        (device,) = rig.nodes[0].devices
        parts = [rig.block_bytes, device.capacity_bytes, device.profile.dram_capacity]
        return (
            parts
            + [pipe.bytes_per_s for pipe in rig.pipes]
            + [rig.nodes[0].prefetcher.window_bytes]
        )

    full = in_virtual_time(spec_of(), sizes)
    scaled = in_virtual_time(spec_of(scale=64), sizes)
    assert [value * 64 for value in scaled] == full


def test_what_a_block_takes_is_the_same_at_any_scale():
    """Bytes and bandwidth shrink together, so seconds stay."""

    async def times(rig):
        await store_and_load(rig)
        return rig.clock.now()

    full = in_virtual_time(spec_of(), times)
    # Footer pages and their share of the links are not scaled: they weigh more.
    assert in_virtual_time(spec_of(scale=64), times) == pytest.approx(full, rel=0.03)


def test_a_scale_that_makes_a_block_smaller_than_a_page_is_refused():
    with VirtualClock() as clock, pytest.raises(ScaleError, match="a KV block"):
        Rig(clock, spec_of(scale=8192), phantom=True)


def test_a_device_larger_than_its_ssds_is_refused():
    with VirtualClock() as clock, pytest.raises(DeviceError, match="2 SSDs"):
        Rig(clock, spec_of(device_capacity_bytes=4096 * GIB), phantom=True)


def test_what_is_held_is_named():
    async def work(rig):
        connector = rig.connectors[0]
        await connector.submit_store(
            1, KEYS, [PhantomBuffer(rig.block_bytes, ObjectTag.of(key)) for key in KEYS]
        ).done.wait()
        await connector.submit_lookup(2, KEYS, rig.block_bytes).done.wait()
        held = rig.at_rest()
        region = rig.fabric.register(rig.nodes[0].devices[0], 0, 4096)
        assert rig.at_rest()["memory regions"] == 1
        rig.fabric.revoke(region)
        await rig.quiesce()
        return held

    held = in_virtual_time(spec_of(), work)
    assert held["requests"] == held["leases"] == held["streams"] == 1
    assert held["leased keys"] == held["read tokens"] == 4


def test_block_times_come_with_the_number_of_the_worker():
    seen = []

    async def work(rig):
        await store_and_load(rig, worker=1)

    in_virtual_time(spec_of(), work, on_block=lambda worker, times: seen.append((worker, times)))
    assert [worker for worker, _ in seen] == [1] * 4
    assert {times.nbytes for _, times in seen} == {BLOCK_BYTES}
    assert all(times.asked_s < times.due_s <= times.done_s for _, times in seen)


# -- files --------------------------------------------------------------------------------------


def open_files(folder: Path) -> list[str]:
    """Return the files in a folder that this process has open (where the system tells)."""
    found = []
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        try:
            target = entry.readlink()
        except OSError:
            continue
        if target.is_relative_to(folder):
            found.append(str(target))
    return found


def test_real_runs_have_a_folder_of_their_own_that_goes_with_them(tmp_path):
    with WallClock() as clock:
        rigs = [
            Rig(clock, spec_of(scale=512), phantom=False, folder=tmp_path / "new") for _ in range(2)
        ]
        folders = sorted((tmp_path / "new").iterdir())
        assert len(folders) == 2
        assert [len(list(folder.glob("*.ssd*"))) for folder in folders] == [2, 2]
        for rig in rigs:
            clock.run(rig.close())
    assert list((tmp_path / "new").iterdir()) == []
    assert open_files(tmp_path) == []


def test_phantom_runs_touch_no_folder(tmp_path):
    async def work(rig):
        assert rig.folder is None

    in_virtual_time(spec_of(), work, folder=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["a file", "a place where nobody may write"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, where):
    folder = Path("/proc/nowhere") if "nobody" in where else tmp_path / "file"
    (tmp_path / "file").write_text("")
    with (
        WallClock() as clock,
        pytest.raises(HostLimitError, match=f"{folder}: .*choose another folder"),
    ):
        Rig(clock, spec_of(scale=512), phantom=False, folder=folder)


@pytest.mark.parametrize("kind", ["cxl-hm", "cmm-h"])
def test_a_rig_that_cannot_be_built_leaves_no_file_open(tmp_path, monkeypatch, kind):
    """The second device fails: the first one's files and threads end, too."""
    made = []
    built_in = rig_module._built_in

    def second_fails(clock, profile, site):
        if made:
            raise HostLimitError("the disk is full")
        made.append(site.name)
        return built_in(clock, profile, site)

    monkeypatch.setattr(rig_module, "_built_in", second_fails)
    with WallClock() as clock, pytest.raises(HostLimitError, match="the disk is full"):
        Rig(clock, spec_of(kind, scale=512, devices_per_node=2), phantom=False, folder=tmp_path)
    assert made == ["node0.dev0"]
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("cxlbench-io")]


@pytest.mark.parametrize("gib", [2, 8, 16, 64])
def test_a_device_holds_about_as_many_blocks_as_fit_its_capacity(gib):
    """Segments are whole extents of a block, so what is left over at their ends is small."""
    fit = gib * GIB // object_extent_bytes(BLOCK_BYTES)

    async def fill(rig):
        (allocator,) = rig.nodes[0].allocators
        held = 0
        while allocator.allocate(object_extent_bytes(BLOCK_BYTES)) is not None:
            held += 1
        return held

    assert in_virtual_time(spec_of("dram", device=device("dram", gib * GIB)), fill) > 0.97 * fit


def test_a_block_that_no_demand_miss_is_sure_to_stage_is_refused_at_the_start():
    """Prefetches that are held could dead-lock it."""
    large = spec_of(block_bytes=256 << 20)
    with VirtualClock() as clock, pytest.raises(BlockTooLargeError, match="raise demand_reserve"):
        Rig(clock, large, phantom=True)
