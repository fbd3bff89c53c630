"""What the command line refuses, and what it says where silence would mislead."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

TIER = ("--workers", "2", "--gpu-blocks", "2", "--capacity", "4GiB")
CXLBENCH = (sys.executable, "-m", "cxlbench.harness.cli")


@pytest.mark.parametrize(
    "words",
    [
        "replay small.jsonl --policy fifo",
        "replay small.jsonl --order head-first",
        "replay small.jsonl --at 1GiB",
        "replay small.jsonl --think-cap 3",
        "replay small.jsonl --unchecked",
        "replay small.jsonl --wall --unchecked",
        "replay small.jsonl --statistics --device nope",
        "replay small.jsonl --statistics --wall",
        "replay small.jsonl --statistics --gpu-blocks 4",
        "replay small.jsonl --statistics --no-prefetch",
        "replay small.jsonl --statistics --faults plan.toml",
        "replay small.jsonl --statistics --seed 3",
        "demo --budget 3",
        "io --rw read --rwmixread 30",
        "pod explore nothing:scenario --bound 3",
        "pod explore nothing:scenario --disturb",
    ],
)
@pytest.mark.usefixtures("small_trace")
def test_an_option_that_would_do_nothing_is_refused(cli, words):
    ran = cli(*words.split())
    assert ran.code == 2
    assert "would do nothing here" in ran.err


@pytest.mark.usefixtures("small_trace")
def test_an_option_of_which_only_the_default_is_idle_is_not_refused(cli):
    assert (
        cli("replay", "small.jsonl", "--statistics", "--at", "1GiB", "--policy", "fifo").code == 0
    )


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize(
    "words",
    [
        "replay small.jsonl --speed",
        "replay small.jsonl --closed-loop --think-cap",
        "replay small.jsonl --scale",
        "io --runtime",
        "io --scale",
        "calibrate --seconds",
        "demo --trace small.jsonl --budget",
        "bench clock --seconds",
        "profiles show pm1743-class --scale",
        "generate out.jsonl --think-s",
    ],
)
@pytest.mark.usefixtures("small_trace")
def test_a_number_that_is_none_is_refused_everywhere(cli, words, number):
    ran = cli(*words.split(), number)
    assert ran.code == 2
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--speed 1e-300", "1000000"),
        ("--devices 300", "devices_per_node=300: must be 1 to 256"),
        ("--capacity 4KiB", "a device of 4 KiB holds no block of 16 MiB"),
        ("--capacity 16MiB", "with its footer that takes 16 MiB"),
        ("--block-tokens 65536", "does not fit the staging buffer of a worker (5 GiB)"),
        ("--device os:getcwd", "getcwd(clock, site) failed with TypeError"),
        ("--device builtins:print", "returned None, which is no device: it has no admit, at_rest"),
        ("--device mine:Sleepy", "it is a class: name a function that makes one of it"),
        ("--device mine.py:make", "name the module, not its file: mine:make"),
        ("--device pm1743-class", "is of kind ssd; a tier is made of"),
        ("--set dram_capacity=1e30GiB", "expected at most 64 TiB"),
        ("--set ssd_count=1e9", "expected at most 1024"),
    ],
)
@pytest.mark.usefixtures("small_trace")
def test_what_no_tier_can_be_made_of_is_a_message(cli, tmp_path, words, message):
    (tmp_path / "mine.py").write_text(
        "from cxlbench.devices.expander import Expander\n\n\nclass Sleepy(Expander):\n    pass\n"
    )
    ran = cli("replay", "small.jsonl", *words.split())
    assert ran.code == 2
    assert message in ran.err


@pytest.mark.usefixtures("small_trace")
def test_a_device_in_this_folder_is_found(cli, tmp_path, monkeypatch):
    """Also by the command ``cxlbench``, on whose path this folder is not."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "device_lying_here.py").write_text(
        "from cxlbench.devices.profile import ExpanderProfile, load_as\n"
        "from cxlbench.harness.rig import make_device\n\n\n"
        "def make(clock, site):\n"
        "    return make_device(clock, load_as(ExpanderProfile, 'remote-dram'), site)\n"
    )
    assert cli("replay", "small.jsonl", *TIER, "--device", "device_lying_here:make").code == 0


def test_a_host_without_the_memory_is_told_what_to_do(cli, monkeypatch):
    def no_room(*_, **__):
        raise MemoryError("Unable to allocate 28 GiB")

    monkeypatch.setattr("cxlbench.harness.io_bench.run_io", no_room)
    ran = cli("io")
    assert ran.code == 2
    assert "Unable to allocate 28 GiB); use a larger --scale" in ran.err


# -- what must not go unsaid ---------------------------------------------------------------------


@pytest.mark.usefixtures("small_trace")
def test_a_run_that_never_read_the_tier_says_so(cli):
    ran = cli("replay", "small.jsonl")
    assert ran.code == 0
    assert "note: no block was read from the tier" in ran.err
    assert "a smaller --gpu-blocks" in ran.err
    assert "block read ms          -\n" in ran.out
    assert "no block was read" not in cli("replay", "small.jsonl", *TIER).err


@pytest.mark.parametrize(
    ("device", "scale", "said"),
    [
        ("cmm-h-256g", "512", "makes misses up to 12% longer"),
        ("cmm-h-256g", "128", ""),
        ("cxl-hm-prototype", "4096", "a block is 1 page(s) and lies on so many of the 2 SSDs"),
        ("cxl-hm-prototype", "1024", ""),
        ("remote-dram", "4096", ""),
    ],
)
@pytest.mark.usefixtures("small_trace")
def test_a_scale_that_distorts_says_so(cli, device, scale, said):
    ran = cli("replay", "small.jsonl", *TIER, "--device", device, "--scale", scale)
    assert ran.code == 0
    assert said in ran.err
    assert ("not those of the full size" in ran.err) == bool(said)


@pytest.mark.usefixtures("small_trace")
def test_a_fault_plan_that_never_fired_is_told(cli, tmp_path):
    (tmp_path / "plan.toml").write_text('[[fault]]\npoint = "ssd.read"\nkind = "corrupt"\n')
    ran = cli("replay", "small.jsonl", *TIER, "--faults", "plan.toml", "--device", "local-dram")
    assert ran.code == 0
    assert "faults injected        ssd.read corrupt 0" in ran.out
    assert "note: the fault plan injected nothing" in ran.err


@pytest.mark.usefixtures("small_trace")
def test_a_seed_that_is_given_is_the_fault_plans_too(cli, tmp_path):
    (tmp_path / "plan.toml").write_text(
        'seed = 3\n[[fault]]\npoint = "ssd.read"\nkind = "corrupt"\nprobability = 0.5\n'
    )

    def injected(*seed):
        found = cli("replay", "small.jsonl", *TIER, "--faults", "plan.toml", *seed, "--json")
        figures = dict(found.document["figures"])
        return found.document["inputs"]["faults"]["seed"], figures["mismatched_blocks"], figures

    assert injected()[0] == 3
    assert injected("--seed", "3")[:2] == injected()[:2]
    by_seed = [injected("--seed", str(seed)) for seed in range(4, 9)]
    assert [seed for seed, *_ in by_seed] == [4, 5, 6, 7, 8]
    assert len({count for _, count, _ in by_seed}) > 1


@pytest.mark.usefixtures("small_trace")
def test_blocks_that_the_devices_could_not_keep_are_told(cli, monkeypatch):
    """A full disk: every block of it is a miss, and the report says why."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    wall = ("--wall", "--folder", "files", "--scale", "512", "--speed", "20")
    ran = cli("replay", "small.jsonl", *TIER, *wall)
    assert ran.code in (0, 3)
    assert "lost by the devices" in ran.out
    assert "each a miss: is the disk full?" in ran.err
    ran = cli("io", "--bs", "1m", "--size", "8m", "--wall", "--folder", "files", "--scale", "64")
    assert ran.code == 2
    assert "is the disk under its backing files full?" in ran.err


# -- files that are none, readers that go, signals ---------------------------------------------


def test_generate_writes_through_a_link_and_into_what_is_no_file(cli, tmp_path):
    knobs = ("--sessions", "1", "--turns", "1")
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert cli("generate", "link", *knobs).code == 0
    assert (tmp_path / "link").is_symlink()
    assert "cxlbench-workload" in (tmp_path / "target").read_text()
    assert cli("generate", "/dev/stdout", *knobs).code == 0
    full = cli("generate", "/dev/full", *knobs)
    assert full.code == 2
    assert "No space left" in full.err
    assert cli("generate", "", *knobs).code == 2
    dash = cli("generate", "-", *knobs)
    assert dash.code == 2
    assert "/dev/stdout" in dash.err
    assert not (tmp_path / "-").exists()


@pytest.mark.usefixtures("small_trace")
def test_a_reader_who_goes_away_is_no_wrong_data(tmp_path):
    """Exit code 1 would say so; this is what a shell gives for SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [*CXLBENCH, "replay", "small.jsonl", *TIER],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    os.close(write)
    assert ran.returncode == 141
    assert "Traceback" not in ran.stderr
    assert "BrokenPipe" not in ran.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("small_trace")
def test_a_run_that_is_terminated_removes_its_files(tmp_path, number, code):
    wall = ("--wall", "--folder", "files", "--scale", "512", "--speed", "0.01")
    with subprocess.Popen(
        [*CXLBENCH, "replay", "small.jsonl", *TIER, *wall],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        try:
            files = tmp_path / "files"
            deadline = time.monotonic() + 60
            while not list(files.glob("*/*")):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code
    assert "terminated; temporary files are removed" in said
    assert list(files.iterdir()) == []
