"""``cxlbench replay``: runs, what they print and write, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from cxlbench.harness.requests import Mode, Request, Workload
from cxlbench.harness.traces import write_workload

TIER = ("--workers", "2", "--gpu-blocks", "2", "--capacity", "4GiB")
"""A GPU cache so small that the tier is needed."""

WALL = ("--wall", "--scale", "512", "--closed-loop", "--think-cap", "0.01")
AVAILABLE_BLOCKS = 4
"""Place of f_bavail in what statvfs returns."""

TIMING = (0, 3)
"""A shared machine may be late: data must be right all the same."""


def test_a_replay_prints_figures_by_turn_and_totals(cli, small_trace):
    ran = cli("replay", small_trace, *TIER)
    assert ran.code == 0
    assert "turn" in ran.out
    assert "TTFT" in ran.out
    assert "wrong blocks" in ran.out
    assert "virtual time" in ran.out
    assert "fidelity" not in ran.out


def test_the_tier_serves_what_the_gpu_lost(cli, small_trace):
    figures = cli("replay", small_trace, *TIER, "--json").document["figures"]
    assert figures["tier_blocks"] > 0
    assert figures["hit_rate"] == 1.0
    assert figures["wrong_blocks"] == 0
    assert [turn["turn"] for turn in figures["turns"]] == [1, 2, 3]


@pytest.mark.parametrize("device", ["cxl-hm-prototype", "cmm-h-256g", "remote-dram"])
def test_every_kind_of_device_replays(cli, small_trace, device):
    ran = cli("replay", small_trace, *TIER, "--device", device, "--json")
    assert ran.code == 0
    assert ran.document["inputs"]["spec"]["rig"]["device"]["name"] == device
    assert ran.document["figures"]["tier_blocks"] > 0


def test_results_are_written_and_the_same_for_the_same_seed(cli, small_trace, tmp_path):
    for name in ("a", "b"):
        assert cli("replay", small_trace, *TIER, "--out", tmp_path / name).code == 0
    first, second = (tmp_path / name / "result.json" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    result = json.loads(first.read_text())
    assert result["inputs"]["seed"] == 1
    assert result["inputs"]["scale"] == 1
    assert result["versions"]["cxlbench"] == "0.1.0"
    run = json.loads((tmp_path / "a" / "run.json").read_text())
    assert run["host"]["cores"] >= 1
    assert run["paths"]["trace"] == str(small_trace)
    assert run["duration_s"] > 0


def test_the_result_does_not_depend_on_pythonhashseed(small_trace, tmp_path):
    for seed in ("1", "2"):
        subprocess.run(
            [
                sys.executable,
                "-m",
                "cxlbench.harness.cli",
                "replay",
                small_trace,
                *TIER,
                "--out",
                tmp_path / seed,
            ],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=60,
        )
    one, two = ((tmp_path / seed / "result.json").read_bytes() for seed in ("1", "2"))
    assert one == two


def test_a_device_is_changed_by_set(cli, small_trace):
    ran = cli("replay", small_trace, *TIER, "--set", "dram_capacity=8GiB", "--json")
    assert ran.document["inputs"]["spec"]["rig"]["device"]["dram_capacity"] == 8 << 30
    assert ran.document["inputs"]["overrides"] == {"dram_capacity": "8GiB"}


def test_limit_and_sessions_take_a_part_of_the_trace(cli, small_trace):
    assert cli("replay", small_trace, "--limit", "4", "--json").document["inputs"]["requests"] == 4
    ran = cli("replay", small_trace, "--sessions", "1", "--json")
    assert ran.document["inputs"]["requests"] == 3


def test_the_default_gpu_cache_is_what_the_weights_leave(cli, small_trace):
    spec = cli("replay", small_trace, "--json").document["inputs"]["spec"]
    weights = 2 * spec["engine"]["shape"]["parameters"]
    room = int(spec["engine"]["accelerator"]["memory_capacity"] * 0.9) - weights
    assert spec["gpu_blocks"] == room // spec["rig"]["block_bytes"]


def test_gpu_kv_is_given_in_bytes(cli, small_trace):
    spec = cli("replay", small_trace, "--gpu-kv", "64MiB", "--json").document["inputs"]["spec"]
    assert spec["gpu_blocks"] == 4


def test_real_bytes_in_real_time_end_with_the_fidelity_line(cli, small_trace, tmp_path):
    ran = cli("replay", small_trace, *TIER, *WALL, "--folder", tmp_path / "files")
    assert ran.code in TIMING
    assert "fidelity: " in ran.out
    assert "; lateness p50 " in ran.out
    assert ("TIMING NOT KEPT" in ran.out) == ("every block was verified all the same" in ran.err)
    assert "plot" not in ran.out
    assert "is not calibrated" in ran.err
    assert list((tmp_path / "files").iterdir()) == []


def test_a_run_in_real_time_says_whether_its_timing_was_kept(cli, small_trace):
    ran = cli("replay", small_trace, *TIER, *WALL, "--json")
    assert ran.code == (0 if ran.document["fidelity"]["trusted"] else 3)
    assert ran.document["correct"] is True


def test_a_run_in_real_time_says_first_how_long_it_takes(cli, small_trace, monkeypatch):
    """T3: by the same work in virtual time."""
    monkeypatch.setattr("cxlbench.harness.progress.QUIET_S", 0.0)
    ran = cli("replay", small_trace, *TIER, *WALL, "--json")
    before, said, after = ran.err.partition("in real time this takes about ")
    assert said
    assert "replaying requests" not in before
    assert "replaying requests: 9 of 9" in after
    model = cli("replay", small_trace, *TIER, *WALL[1:], "--json").document["figures"]
    assert float(after.split()[0]) == pytest.approx(model["duration_s"], abs=0.051)
    assert "--limit" in after


def test_an_estimate_leaves_the_faults_of_the_run_alone(cli, small_trace, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\npoint = "ssd.read"\nkind = "corrupt"\nlimit = 1\n')
    ran = cli("replay", small_trace, *TIER, *WALL, "--faults", plan, "--json")
    assert ran.document["figures"]["injected"] == {"ssd.read corrupt": 1}
    assert ran.document["figures"]["mismatched_blocks"] == 1


def test_a_run_in_virtual_time_estimates_nothing(cli, small_trace):
    assert cli("replay", small_trace, *TIER).err == ""


def test_timing_that_was_not_kept_exits_3_and_marks_the_run(cli, small_trace, monkeypatch):
    monkeypatch.setattr("cxlbench.harness.fidelity.MAX_LATE_P99_S", -1.0)
    ran = cli("replay", small_trace, *TIER, *WALL, "--json")
    assert ran.code == 3
    assert ran.document["fidelity"]["trusted"] is False


def test_wrong_data_exits_1_and_is_named(cli, small_trace, monkeypatch):
    from cxlbench.harness.content import BlockContent

    monkeypatch.setattr(BlockContent, "holds", lambda self, buffer, key: False)
    ran = cli("replay", small_trace, *TIER, "--json")
    assert ran.code == 1
    assert ran.document["figures"]["wrong_blocks"] > 0
    assert "wrong blocks were delivered" in ran.err


def test_a_leak_exits_1_and_is_named(cli, small_trace, monkeypatch):
    from cxlbench.harness.rig import Rig

    monkeypatch.setattr(Rig, "at_rest", lambda self: {"staging frames": 3})
    ran = cli("replay", small_trace, *TIER)
    assert ran.code == 1
    assert "3 staging frames" in ran.err


def test_faults_are_survived_and_counted(cli, small_trace, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('seed = 3\n[[fault]]\npoint = "ssd.read"\nkind = "corrupt"\n')
    ran = cli("replay", small_trace, *TIER, "--faults", plan, "--json")
    assert ran.code == 0
    figures = ran.document["figures"]
    assert figures["injected"]["ssd.read corrupt"] > 0
    assert figures["mismatched_blocks"] > 0
    assert figures["wrong_blocks"] == 0
    assert ran.document["inputs"]["faults"]["seed"] == 3


def test_a_bad_fault_plan_is_refused(cli, small_trace, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\npoint = "ssd.reed"\nkind = "corrupt"\n')
    ran = cli("replay", small_trace, "--faults", plan)
    assert ran.code == 2
    assert "plan.toml: fault 1: unknown point 'ssd.reed'" in ran.err


def test_statistics_count_as_recorded_and_as_replayed(cli, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": 700, "output_length": 3, "hash_ids": ids})
            + "\n"
            for t, ids in enumerate([[1, 2], [1, 2], [1, 3]])
        )
    )
    recorded = cli("replay", path, "--statistics", "--json").document
    assert recorded["counts"] == {"requests": 3, "references": 6, "distinct": 3, "hit_share": 0.5}
    assert [at["capacity_bytes"] >> 30 for at in recorded["capacities"]] == [
        16,
        64,
        256,
        1024,
        4096,
    ]
    whole = cli("replay", path, "--statistics", "--mode", "whole-blocks", "--at", "64MiB", "--json")
    assert whole.document["counts"]["distinct"] == 1
    assert len(whole.document["capacities"]) == 1


def test_statistics_print_hit_rates(cli, small_trace):
    ran = cli("replay", small_trace, "--statistics", "--at", "64GiB", "--policy", "fifo")
    assert ran.code == 0
    assert "fifo hits %" in ran.out
    assert "64 GiB" in ran.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "as-recorded"), "--statistics"),
        (("--gpu-blocks", "1", "--gpu-kv", "1GiB"), "give one of them"),
        (("--folder", "x"), "--wall"),
        (("--at", "1GiB"), "--statistics"),
        (("--device", "nic-100g"), "a tier is made of cxl-hm, cmm-h, expander"),
        (("--device", "nothing"), "there is no profile 'nothing'"),
        (("--model", "gpt"), "there is no model shape 'gpt'"),
        (("--capacity", "64TiB"), "asked, its 2 SSDs have"),
        (("--scale", "0.5"), "--scale"),
        (("--speed", "0"), "--speed"),
        (("--set", "dram_capacity=32"), "without a unit"),
        (("--statistics", "--policy", "best"), "best"),
        (("--scale", "10000"), "use a scale of at most 4096"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_is_refused_with_a_message(cli, small_trace, options, message):
    ran = cli("replay", small_trace, *options)
    assert (ran.code, ran.out) == (2, "")
    assert message in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


def test_a_truncated_trace_names_the_line(cli, small_trace):
    text = small_trace.read_text()
    small_trace.write_text(text[: len(text) - 30])
    ran = cli("replay", small_trace)
    assert ran.code == 2
    assert "small.jsonl, line 10: not one JSON object on a line" in ran.err


def test_an_unknown_format_lists_the_known_ones(cli, tmp_path):
    (tmp_path / "x.txt").write_text("hello\n")
    ran = cli("replay", tmp_path / "x.txt")
    assert ran.code == 2
    assert "unknown format" in ran.err
    assert "mooncake" in ran.err


def test_a_trace_that_is_not_there_is_an_error(cli, tmp_path):
    ran = cli("replay", tmp_path / "none.jsonl")
    assert (ran.code, ran.out) == (2, "")
    assert "cannot be read" in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ("replay",),
        ("replay", "--block-tokens", "128"),
        ("replay", "--statistics"),
        ("demo", "--trace"),
    ],
    ids=" ".join,
)
def test_a_trace_without_ids_is_refused_in_one_step(cli, tmp_path, words):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    ran = cli(*words, path)
    assert ran.code == 2
    assert "records lengths only" in ran.err
    assert "choose a trace with ids" in ran.err


def test_a_closed_loop_needs_sessions(cli, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n')
    ran = cli("replay", path, "--closed-loop")
    assert ran.code == 2
    assert "a closed loop needs sessions" in ran.err


def test_prompts_of_no_token_and_one_token_are_replayed(cli, tmp_path):
    requests = tuple(
        Request(number, f"s{number}", 1, 0.0, tokens, output, ())
        for number, (tokens, output) in enumerate([(0, 0), (1, 1), (0, 5), (1, 0)])
    )
    path = tmp_path / "tiny.jsonl"
    write_workload(Workload("tiny", 16, Mode.WHOLE_BLOCKS, requests, has_sessions=True), path)
    ran = cli("replay", path, "--json")
    assert ran.code == 0
    assert ran.document["figures"]["requests"] == 4
    assert ran.document["figures"]["reusable_blocks"] == 0


def test_a_device_larger_than_the_disk_is_refused_with_the_scale_that_fits(
    cli, small_trace, tmp_path, monkeypatch
):
    real = os.statvfs

    def small(path):
        found = list(real(path))
        found[AVAILABLE_BLOCKS] = 1024
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", small)
    ran = cli("replay", small_trace, *WALL, "--folder", tmp_path)
    assert ran.code == 2
    assert "the devices are larger than the disk" in ran.err
    assert "use --scale" in ran.err


def test_a_folder_that_cannot_be_written_is_refused(cli, small_trace, tmp_path):
    (tmp_path / "file").write_text("in the way")
    ran = cli("replay", small_trace, *TIER, *WALL, "--folder", tmp_path / "file" / "below")
    assert ran.code == 2
    assert "choose another folder" in ran.err
    assert "Traceback" not in ran.err


def test_results_that_cannot_be_written_are_an_error(cli, small_trace, tmp_path):
    (tmp_path / "file").write_text("in the way")
    ran = cli("replay", small_trace, *TIER, "--out", tmp_path / "file" / "below")
    assert ran.code == 2
    assert "cannot write results" in ran.err


def test_a_full_disk_loses_blocks_but_no_data(cli, small_trace, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    ran = cli("replay", small_trace, *TIER, *WALL, "--folder", tmp_path / "files", "--json")
    assert ran.code in TIMING
    assert ran.document["figures"]["wrong_blocks"] == 0
    assert ran.document["figures"]["requests"] == 9
    assert list((tmp_path / "files").iterdir()) == []


def test_a_disk_too_full_for_the_files_is_an_error(cli, small_trace, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "ftruncate", full)
    ran = cli("replay", small_trace, *TIER, *WALL, "--folder", tmp_path / "files")
    assert ran.code == 2
    assert "cannot make the backing file" in ran.err
    assert list((tmp_path / "files").iterdir()) == []


def test_an_interrupt_in_mid_run_exits_130_and_leaves_no_files(
    cli, small_trace, tmp_path, monkeypatch
):
    from cxlbench.harness.worker import Worker

    seen = []
    serve = Worker.serve

    async def interrupted(self, request):
        if request.request_id == 4 and (tmp_path / "files").exists():  # not while it estimates
            seen.extend((tmp_path / "files").iterdir())
            signal.raise_signal(signal.SIGINT)
        return await serve(self, request)

    monkeypatch.setattr(Worker, "serve", interrupted)
    ran = cli("replay", small_trace, *TIER, *WALL, "--folder", tmp_path / "files")
    assert len(seen) == 1
    assert ran.code == 130
    assert "interrupted" in ran.err
    assert list((tmp_path / "files").iterdir()) == []
    assert not (tmp_path / "results").exists()


def test_ctrl_c_in_a_shell_exits_130_and_leaves_no_files(small_trace, tmp_path):
    folder = tmp_path / "files"
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cxlbench.harness.cli",
            "replay",
            small_trace,
            *TIER,
            "--wall",
            "--scale",
            "512",
            "--speed",
            "0.08",
            "--folder",
            folder,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    try:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("replaying requests"):
                break
        assert len(list(folder.iterdir())) == 1
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == 130
    assert "Traceback" not in err
    assert list(folder.iterdir()) == []
