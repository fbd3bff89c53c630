"""What one server's lookup, load and store take, against arithmetic, to 1 %."""

from __future__ import annotations

import pytest

from cxlbench.devices.profile import (
    CopyEngineProfile,
    LinkProfile,
    LocalCacheProfile,
    ObjectStoreProfile,
    RemoteVolumeProfile,
    SharedType3Profile,
    SsdProfile,
    ValueServerProfile,
    load_as,
)
from tests.harness.tiers.desk import GIB, MIB, Desk, chain

COPY = load_as(CopyEngineProfile, "gpu-copy-gen4x16")
NIC = load_as(LinkProfile, "nic-100g")
NIC_200 = load_as(LinkProfile, "nic-200g")
LOCAL = load_as(LocalCacheProfile, "lmcache-local")
STORE = load_as(ObjectStoreProfile, "mooncake-store")
REDIS = load_as(ValueServerProfile, "redis-64g")
VOLUME = load_as(RemoteVolumeProfile, "nvmeof-xfs")
SSD = load_as(SsdProfile, "pm1743-class")
MEMORY = load_as(SharedType3Profile, "niagara-2.0")

BLOCKS, SIZE, GROUP = 80, 16 * MIB, 8
ALL, LAST = BLOCKS * SIZE, GROUP * SIZE


def one_load(desk: Desk, *, server: int = 0) -> tuple[float, float, float]:
    """Return the times of a store with its puts, of a lookup and of a load of all blocks, s."""

    async def test() -> tuple[float, float, float]:
        keys, clock = chain(BLOCKS), desk.clock
        times = [clock.now()]
        await desk.stored(keys)
        times.append(clock.now())
        assert (await desk.lookup(1, keys, server=server)).leading_hits == BLOCKS
        times.append(clock.now())
        assert (await desk.load(1, keys, server=server)).leading_hits == BLOCKS
        times.append(clock.now())
        desk.connector(server).release(1)
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    found: tuple[float, float, float] = desk.run(test)
    return found


def test_local_dram_takes_the_copies() -> None:
    store_s, lookup_s, load_s = one_load(Desk("lmcache-local"))
    copies = BLOCKS // GROUP
    assert store_s == pytest.approx(ALL / COPY.bandwidth + copies * COPY.latency, rel=0.01)
    assert lookup_s == pytest.approx(BLOCKS * LOCAL.lookup_chunk, rel=0.01)
    assert load_s == pytest.approx(ALL / COPY.bandwidth + COPY.latency, rel=0.01)


def test_distributed_dram_takes_the_port_and_the_last_copy() -> None:
    # Everything is in server 0's segment, and server 1 reads it.
    store_s, lookup_s, load_s = one_load(Desk("mooncake", segments=1), server=1)
    assert store_s == pytest.approx(ALL / COPY.bandwidth, rel=0.05)
    assert lookup_s == pytest.approx(STORE.master_call + BLOCKS * STORE.master_key, rel=0.01)
    assert load_s == pytest.approx(ALL / NIC.bandwidth + LAST / COPY.bandwidth, rel=0.01)


def test_a_port_is_shared_by_all_that_read_from_its_segment() -> None:
    desk = Desk("mooncake", segments=1, servers=3)

    async def test() -> float:
        keys = chain(BLOCKS)
        await desk.stored(keys)
        began = desk.clock.now()
        await desk.clock.gather(*[desk.read(keys, server=server) for server in (1, 2)])
        return desk.clock.now() - began

    expected = 2 * ALL / NIC.bandwidth + LAST / COPY.bandwidth
    assert desk.run(test) == pytest.approx(expected, rel=0.01)


def test_own_segments_are_read_at_the_speed_of_memory() -> None:
    _, _, load_s = one_load(Desk("mooncake", segments=1))
    assert ALL / COPY.bandwidth < load_s < ALL / COPY.bandwidth * 1.05 + LAST / COPY.bandwidth


@pytest.mark.parametrize("files", [True, False])
def test_nvmeof_takes_the_file_system_or_the_raw_device(files: bool) -> None:
    _, _, load_s = one_load(Desk("mooncake-nvmeof", file_system=files))
    master_s = STORE.master_call + BLOCKS * STORE.master_key
    latency_s = SSD.read_latency + 2 * NIC_200.latency
    moved_s = ALL / (VOLUME.file_bandwidth if files else VOLUME.raw_bandwidth)
    opened_s = BLOCKS * VOLUME.file_operation if files else 0.0
    around_s = master_s + BLOCKS // GROUP * latency_s + LAST / COPY.bandwidth
    assert load_s == pytest.approx(moved_s + opened_s + around_s, rel=0.01)


def test_four_servers_share_the_storage_port() -> None:
    desk = Desk("mooncake-nvmeof", servers=4, capacity_bytes=64 * GIB)

    async def test() -> float:
        chains = [chain(BLOCKS, number) for number in range(4)]
        for server, keys in enumerate(chains):
            await desk.stored(keys, server=server)
        began = desk.clock.now()
        await desk.clock.gather(*[desk.read(k, server=s) for s, k in enumerate(chains)])
        return desk.clock.now() - began

    # 6.25 GB/s each of the port's 25, below the file system's 6.5.
    at_least = 4 * ALL / NIC_200.bandwidth
    assert at_least < desk.run(test) < at_least * 1.1


def test_redis_takes_its_thread() -> None:
    store_s, lookup_s, load_s = one_load(Desk("redis"))
    assert store_s == pytest.approx(ALL / REDIS.set_bandwidth, rel=0.01)
    each_s = REDIS.round_trip + REDIS.command + LOCAL.lookup_chunk
    assert lookup_s == pytest.approx(BLOCKS * each_s, rel=0.01)
    assert load_s == pytest.approx(ALL / REDIS.get_bandwidth + LAST / COPY.bandwidth, rel=0.01)


def test_a_local_cache_before_redis_hides_it() -> None:
    _, _, load_s = one_load(Desk("lmcache-redis"))
    assert load_s == pytest.approx(ALL / COPY.bandwidth + COPY.latency, rel=0.01)


def test_shared_memory_takes_its_bandwidth() -> None:
    _, _, load_s = one_load(Desk("tract", capacity_bytes=4 * GIB), server=1)
    assert load_s == pytest.approx(ALL / MEMORY.bandwidth, rel=0.01)
