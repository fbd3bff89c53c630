"""A deployment's processes: started, watched, ended; nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cxlbench.emu import unix_paths
from cxlbench.emu.memory import Arena
from cxlbench.emu.numa import bind_memory, numa_nodes
from cxlbench.emu.status import HostLimitError
from cxlbench.emu.unix_paths import Door
from cxlbench.harness import supervisor
from cxlbench.harness.deployment import DeploymentError, DeploymentSpec
from cxlbench.harness.deployment_config import make_spec
from cxlbench.harness.deployment_status import directory, read_status
from cxlbench.harness.supervisor import Deployment, PartFailedError

SMALL = {"scale": 1024, "capacity": "8 GiB"}


def spec_in(place: Path, **values) -> DeploymentSpec:
    return make_spec({"run_dir": place / "run" / "x", **SMALL, **values})


def until(true, *, within_s=10.0):
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_deployment_comes_up_answers_survives_its_parts_and_leaves_nothing(tmp_path):
    spec = spec_in(tmp_path, nodes=2)
    deployment = Deployment(spec)
    deployment.start()
    try:
        pids = [deployment.pid(*part) for part in deployment.parts]
        status = read_status(spec)
        assert [part.name for part in status.parts] == ["Master", "node 0", "node 1"]
        assert status.complete
        assert [part.figures["clients"] for part in status.parts] == [2, 1, 1]
        before = directory(spec, timeout_s=2)

        deployment.kill("node", 1)
        deployment.restart("node", 1)
        after = directory(spec, timeout_s=2)
        assert after[0].epoch == before[0].epoch
        assert after[1].epoch != before[1].epoch

        deployment.kill("master")
        deployment.restart("master")
        assert directory(spec, timeout_s=2) == after
        assert deployment.ended() == []

        os.kill(deployment.pid("node", 0), signal.SIGKILL)
        until(lambda: not deployment.running("node", 0))
        (ended,) = deployment.ended()
        assert ended.name == "node 0"
        assert "SIGKILL" in ended.line()
        assert deployment.ended() == []
        pids += [deployment.pid(*part) for part in deployment.parts]
    finally:
        deployment.stop()
    assert not any(alive(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []
    deployment.stop()


def test_a_part_that_is_stopped_does_not_answer_and_costs_the_others_nothing(tmp_path):
    spec = spec_in(tmp_path)
    with Deployment(spec) as deployment:
        deployment.kill("node", 0, signal.SIGSTOP)
        begin_s = time.monotonic()
        status = read_status(spec)
        assert time.monotonic() - begin_s < 1.5
        assert [part.trouble for part in status.parts] == ["", "does not answer"]
        assert status.anything
        assert not status.complete
        deployment.kill("node", 0, signal.SIGCONT)
        until(lambda: read_status(spec).complete)
        deployment.kill("node", 0, signal.SIGSTOP)  # and it is ended all the same
    assert list(tmp_path.iterdir()) == []


def test_a_second_deployment_in_a_run_directory_is_refused_and_the_first_goes_on(tmp_path):
    spec = spec_in(tmp_path)
    with Deployment(spec) as deployment:
        second = Deployment(spec_in(tmp_path, nodes=3))
        with pytest.raises(DeploymentError, match="a deployment runs in"):
            second.start()
        second.stop()
        assert deployment.running("master")
        assert read_status(spec).complete
        assert directory(spec, timeout_s=2).keys() == {0}


def test_a_port_in_use_is_named_and_everything_is_taken_down_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec = spec_in(tmp_path, listen=f"tcp://127.0.0.1:{port}")
        deployment = Deployment(spec)
        with pytest.raises(PartFailedError, match=rf"(?s)Master ended.*{port}.*in use"):
            deployment.start()
    assert [path.name for path in spec.run_dir.iterdir()] == ["master.log"]


@pytest.mark.parametrize("stopped", ["", "master", "node"])
def test_what_a_killed_deployment_left_is_no_obstacle_and_its_processes_end_with_it(
    tmp_path, stopped
):
    spec = spec_in(tmp_path)
    script = textwrap.dedent(
        f"""
        import signal
        from cxlbench.harness.deployment_config import make_spec
        from cxlbench.harness.supervisor import Deployment
        deployment = Deployment(make_spec({{"run_dir": {str(spec.run_dir)!r}, **{SMALL!r}}}))
        deployment.start()
        if {stopped!r}:
            deployment.kill({stopped!r}, 0, signal.SIGSTOP)
        print(deployment.pid("master"), deployment.pid("node"), flush=True)
        input()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    assert {"master.lock", "deployment.json"} <= {path.name for path in spec.run_dir.iterdir()}
    until(lambda: not alive(pids[0]))
    with socket.socket(socket.AF_UNIX) as stale, Door(spec.endpoint("master")) as door:
        (spec.run_dir / "master.sock").unlink(missing_ok=True)
        stale.bind(door.path)
    with Deployment(spec):  # waits for the other orphan, which the kernel has told to end
        assert not any(alive(pid) for pid in pids)
        assert read_status(spec).complete


def test_backing_files_stay_where_the_user_wants_them(tmp_path):
    files = tmp_path / "ssd"
    files.mkdir()
    with Deployment(spec_in(tmp_path, folder=files)):
        pass
    assert [path.name for path in sorted(files.iterdir())] == [
        "node0.dev0.layout",
        "node0.dev0.ssd0",
        "node0.dev0.ssd1",
    ]
    assert list(tmp_path.iterdir()) == [files]


def test_a_folder_is_not_taken_for_another_device_than_it_was_made_for(tmp_path):
    files = tmp_path / "ssd"
    files.mkdir()
    with Deployment(spec_in(tmp_path, folder=files)):
        pass
    before = {path.name: path.stat().st_size for path in files.iterdir()}
    for change in ({"capacity": "4 GiB"}, {"scale": 64}):
        with pytest.raises(PartFailedError, match=r"(?s)node 0 ended.*would be lost"):
            Deployment(spec_in(tmp_path, folder=files, **change)).start()
    assert {path.name: path.stat().st_size for path in files.iterdir()} == before
    with Deployment(spec_in(tmp_path, folder=files, capacity="16 GiB")):  # it may grow
        pass


def test_two_deployments_on_one_folder_are_refused_and_the_first_goes_on(tmp_path):
    files = tmp_path / "ssd"
    files.mkdir()
    spec = spec_in(tmp_path, folder=files)
    with Deployment(spec):
        second = spec_in(tmp_path / "other", folder=files)
        with pytest.raises(PartFailedError, match="belongs to another device that is running"):
            Deployment(second).start()
        assert read_status(spec).complete


def test_a_run_directory_may_have_a_path_that_is_too_long_for_sockets(tmp_path):
    spec = spec_in(tmp_path / ("long-" * 20) / ("longer-" * 20))
    if not unix_paths.takes_any_length():
        pytest.skip("this system has no /proc/self/fd")
    with Deployment(spec) as deployment:
        assert (spec.run_dir / "node0.sock").is_socket()
        deployment.kill("node")
        deployment.restart("node")
        assert read_status(spec).complete
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_its_last_holder_has_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """A deployment ends between our opening of the lock and our taking it."""
    spec = spec_in(tmp_path)
    spec.run_dir.mkdir(parents=True)
    taken = []
    flock = supervisor.fcntl.flock

    def late(file, how):
        if not taken:
            (spec.run_dir / "up.lock").unlink()
        taken.append(file)
        flock(file, how)

    monkeypatch.setattr(supervisor.fcntl, "flock", late)
    deployment = Deployment(spec)
    deployment._take_run_dir()
    assert len(taken) == 2
    with pytest.raises(DeploymentError, match="a deployment runs in"):
        Deployment(spec)._take_run_dir()
    deployment.stop()


def test_a_run_directory_that_was_there_stays_with_what_others_put_into_it(tmp_path):
    spec = spec_in(tmp_path)
    spec.run_dir.mkdir(parents=True)
    (spec.run_dir / "mine.txt").write_text("mine")
    with Deployment(spec):
        pass
    assert [path.name for path in spec.run_dir.iterdir()] == ["mine.txt"]


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(HostLimitError, match="choose another"):
        Deployment(spec_in(tmp_path)).start()


# -- where the nodes' memory is -----------------------------------------------------------------


@pytest.mark.skipif(not numa_nodes(), reason="this host tells of no NUMA nodes")
def test_memory_and_threads_of_a_node_are_bound_to_a_numa_node(tmp_path):
    numa = numa_nodes()[0]
    deployment = Deployment(spec_in(tmp_path, numa_node=numa.number))
    arena = Arena(4096)
    with contextlib.closing(arena):
        try:
            bind_memory(arena.array, numa.number)
        except HostLimitError:
            with pytest.raises(PartFailedError, match="mbind"):
                deployment.start()
            return
    deployment.start()
    try:
        pid = deployment.pid("node")
        maps = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
        (device,) = [line for line in maps if "cxlbench-node0-dev0" in line]
        assert f"bind:{numa.number}" in device
        assert os.sched_getaffinity(pid) == set(numa.cpus)
    finally:
        deployment.stop()


def test_memory_on_a_dax_device_is_mapped_from_its_file(tmp_path):
    device = tmp_path / "dax0.0"  # a plain file stands for it
    with device.open("wb") as file:
        file.truncate(256 << 20)
    spec = spec_in(tmp_path, dax=[str(device)])
    with Deployment(spec) as deployment:
        assert str(device) in Path(f"/proc/{deployment.pid('node')}/maps").read_text()
    assert device.stat().st_size == 256 << 20


def test_a_dax_device_that_is_too_small_is_refused_with_what_is_needed(tmp_path):
    device = tmp_path / "dax0.0"
    device.write_bytes(bytes(4096))
    with pytest.raises(PartFailedError, match=r"dax0\.0 has 4096 B, .* needs \d+ B"):
        Deployment(spec_in(tmp_path, dax=[str(device)])).start()


def test_huge_pages_that_are_not_there_are_refused_with_how_to_reserve_some(tmp_path):
    free = re.search(r"HugePages_Free: +(\d+)", Path("/proc/meminfo").read_text())
    if free is not None and int(free[1]):
        pytest.skip("this host has free huge pages")
    with pytest.raises(PartFailedError, match=r"(?s)node 0 ended.*huge pages"):
        Deployment(spec_in(tmp_path, hugetlb=True)).start()
