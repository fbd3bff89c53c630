"""The configuration of a deployment: where values come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlbench.emu import unix_paths
from cxlbench.harness.deployment import DeploymentError, DeploymentSpec, load_spec
from cxlbench.harness.deployment_config import make_spec, read_config


def refused(**values) -> list[str]:
    with pytest.raises(DeploymentError) as refusal:
        make_spec(values)
    return refusal.value.problems


def test_flags_override_the_environment_which_overrides_the_file(tmp_path):
    file = tmp_path / "tier.toml"
    file.write_text('nodes = 2\nscale = 64\ncapacity = "8 GiB"\n')
    environment = {"CXLBENCH_NODES": "3", "CXLBENCH_SCALE": "256", "CXLBENCH_TRACES": "/elsewhere"}
    spec = read_config(file, environment, {"nodes": "4", "scale": None})
    assert (spec.nodes, spec.scale, spec.capacity) == (4, 256, 8 << 30)


def test_an_environment_variable_that_is_nearly_a_key_is_a_slip_and_others_are_not_ours():
    for variable, key in (("CXLBENCH_NODE", "nodes"), ("CXLBENCH_CAPACTIY", "capacity")):
        with pytest.raises(DeploymentError, match=rf"{variable}: .*did you mean {key}\?"):
            read_config(None, {variable: "2"}, {})
    others = {"CXLBENCH_TRACES": "x", "CXLBENCH_RESULTS_BUCKET": "y", "CXLBENCHNODES": "z"}
    assert read_config(None, others, {}) == DeploymentSpec()


def test_without_anything_the_defaults_are_a_deployment():
    assert read_config(None, {}, {}) == DeploymentSpec()


def test_all_that_is_wrong_is_said_at_once_each_with_where_it_was_said(tmp_path):
    file = tmp_path / "tier.toml"
    file.write_text('nodes = 0\ndevice = "none-such"\nnode = 2\ncapacity = "12 parsecs"\n')
    with pytest.raises(DeploymentError) as refusal:
        read_config(file, {"CXLBENCH_DEADLINE_S": "soon"}, {"node_link": "none-such"})
    problems = refusal.value.problems
    assert len(problems) == 6
    text = str(refusal.value)
    for begin in (
        f"{file}: nodes: 0 must be from 1 to 64",
        f"{file}: node: no such key; did you mean nodes?",
        f"{file}: capacity: '12 parsecs'",
        f"{file}: device: there is no profile 'none-such'",
        "CXLBENCH_DEADLINE_S: deadline_s: 'soon' must be a time, such as 10s",
        "--node-link: node_link: there is no profile 'none-such'",
    ):
        assert any(problem.startswith(begin) for problem in problems), (begin, text)


@pytest.mark.parametrize("given", [10, "10", "10s", "10000 ms"])
def test_times_are_in_seconds_unless_they_say_otherwise(given):
    spec = make_spec({"deadline_s": given, "call_timeout_s": given})
    assert (spec.deadline_s, spec.call_timeout_s) == (10, 10)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nodes": 2.5}, "whole number"),
        ({"nodes": True}, "whole number"),
        ({"nodes": "many"}, "whole number"),
        ({"scale": "nan"}, "finite"),
        ({"scale": "inf"}, "finite"),
        ({"scale": 0.5}, "at least 1"),
        ({"capacity": -1}, "at least 4096 B"),
        ({"capacity": 1.5}, "size such as"),
        ({"capacity": "8 MiB"}, "hold at least one block"),
        ({"prefetch": "perhaps"}, "true or false"),
        ({"deadline_s": 0}, "0.01 to 3600"),
        ({"device": ""}, "must be a text"),
        ({"device": "nic-100g"}, "no device that keeps blocks"),
        ({"device": "none.such:thing"}, "cannot import"),
        ({"device_set": {"dram_capacity": "much"}}, "dram_capacity"),
        ({"device_set": "dram_capacity"}, "KEY=VALUE"),
        ({"device": "cmm-h-256g", "throttled": False}, "only a cxl-hm"),
        ({"software": "nic-100g"}, "software"),
        ({"dax": ["/dev/none-such"]}, "is not there"),
        ({"dax": ["/dev/null", "/dev/null"], "nodes": 2}, "cannot share"),
        ({"dax": ["/dev/null"], "nodes": 2}, "1 files for 2 devices"),
        ({"dax": ["/dev/null"], "hugetlb": True}, "leave one of both out"),
        ({"dax": 7}, "list of paths"),
        ({"numa_node": 4000}, "no NUMA node 4000"),
        ({"listen": "udp://127.0.0.1:1"}, "unix or tcp"),
        ({"listen": "tcp://127.0.0.1:http"}, "unix or tcp"),
        ({"listen": "tcp://127.0.0.1:65535"}, "end at 65535"),
        ({"listen": "tcp://tier.example:7000"}, "IPv4 address"),
        ({"listen": "tcp://[::1]:7000"}, "IPv4 address"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(values, said):
    (problem,) = refused(**values)
    assert said in problem


def test_only_loopback_is_served_unless_more_is_asked_for_by_name():
    (problem,) = refused(listen="tcp://0.0.0.0:7000")
    assert "allow_remote = true" in problem
    assert make_spec({"listen": "tcp://0.0.0.0:7000", "allow_remote": True}).allow_remote
    for host in ("127.0.0.1", "127.1.2.3", "localhost"):
        make_spec({"listen": f"tcp://{host}:7000"})


def test_a_run_directory_of_any_length_will_do_where_the_system_helps(monkeypatch, tmp_path):
    long = "/tmp/" + "x" * 200
    if unix_paths.takes_any_length():
        assert make_spec({"run_dir": long}).run_dir == Path(long)
    monkeypatch.setattr(unix_paths, "SHORTCUT", tmp_path / "none")
    (problem,) = refused(run_dir=long)
    assert "shorter" in problem


@pytest.mark.parametrize("scale", [None, "1", "3.7"])
def test_without_throttles_any_scale_will_do(scale):
    spec = read_config(None, {}, {"throttled": False, "scale": scale, "capacity": "4 GiB"})
    assert not spec.throttled


def test_a_path_that_no_system_has_is_not_there():
    for path in ("/dev/" + "x" * 300, "/dev/a\0b"):
        (problem,) = refused(dax=[path])
        assert "is not there" in problem


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"scale": "100000"}, "use a scale of at most"),
        ({"block_bytes": "6 GiB", "capacity": "64 GiB"}, "staging buffer of a worker"),
        ({"capacity": "900 TiB"}, "SSDs have"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_starts(flags, said):
    with pytest.raises(DeploymentError, match=said):
        read_config(None, {}, flags)


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("nodes = = 2")
    for path in (tmp_path / "none.toml", bad):
        with pytest.raises(DeploymentError, match=path.name):
            read_config(path, {}, {})


def test_environment_and_options_can_hold_every_kind_of_value():
    spec = read_config(
        None,
        {
            "CXLBENCH_DEVICE_SET": "dram_capacity=16 GiB, ssd.read_latency=80 us",
            "CXLBENCH_PREFETCH": "off",
            "CXLBENCH_FOLDER": "",
        },
        {"numa_node": ""},
    )
    assert spec.device_set == {"dram_capacity": "16 GiB", "ssd.read_latency": "80 us"}
    assert (spec.prefetch, spec.folder, spec.numa_node) == (False, None, None)


def test_a_saved_spec_comes_back_as_it_was(tmp_path):
    spec = DeploymentSpec(
        run_dir=tmp_path / "run",
        nodes=3,
        capacity=None,
        device_set={"dram_capacity": "1 GiB"},
        folder=Path("ssd"),
        dax=(Path("/dev/dax0.0"),),
        scale=1.5,
    )
    spec.save()
    assert load_spec(tmp_path / "run") == spec


def test_where_nothing_runs_it_says_how_to_start_something(tmp_path):
    with pytest.raises(DeploymentError, match="cxlbench up --run-dir"):
        load_spec(tmp_path)
    (tmp_path / "deployment.json").write_text('{"nodes": "many"}')
    with pytest.raises(DeploymentError, match="no deployment of this version"):
        load_spec(tmp_path)


def test_master_and_nodes_serve_at_ports_one_after_the_other():
    spec = make_spec({"listen": "tcp://localhost:7000", "nodes": 2})
    ports = [spec.endpoint("master"), spec.endpoint("node", 0), spec.endpoint("node", 1)]
    assert ports == [f"tcp://127.0.0.1:{port}" for port in (7000, 7001, 7002)]
