"""The bench's own format: what is written is read back, whole or in larger blocks."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Mode, Request, Workload, blocks_of
from cxlbench.harness.traces import (
    TraceError,
    detect_format,
    open_trace,
    read_trace,
    write_workload,
)
from cxlbench.harness.traces.blocks import Chains

BLOCK_TOKENS = 4
SECONDS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def workloads(draw):
    """Draw workloads of any chained prompts, sessions and waits."""
    mode = draw(st.sampled_from(Mode))
    chains = Chains()
    requests: list[Request] = []
    last: dict[str, int] = {}
    for position, arrival_s in enumerate(sorted(draw(st.lists(SECONDS, max_size=8)))):
        input_tokens = draw(st.integers(0, 20))
        count = blocks_of(input_tokens, BLOCK_TOKENS, mode)
        chain: list[int] = []
        chains.extend(chain, draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
        session = draw(st.sampled_from(["a", "b", "é\n"]))
        requests.append(
            Request(
                request_id=position,
                session=session,
                turn=draw(st.integers(1, 9)),
                arrival_s=arrival_s,
                input_tokens=input_tokens,
                output_tokens=draw(st.integers(0, 9)),
                block_ids=tuple(chain),
                think_s=draw(SECONDS),
                after=draw(st.sampled_from([None, last.get(session)])),
            )
        )
        last[session] = position
    flags = draw(st.booleans()), draw(st.booleans())
    return Workload(draw(st.text()), BLOCK_TOKENS, mode, tuple(requests), *flags)


@given(workloads(), st.sampled_from(["w.jsonl", "w.jsonl.gz"]))
def test_a_workload_is_read_back_as_it_was_written(tmp_path, workload, name):
    path = tmp_path / name
    write_workload(workload, path)
    assert detect_format(path).name == "cxlbench"
    assert read_trace(path, mode=workload.mode) == workload


@given(workloads())
def test_partial_blocks_are_left_out_on_demand(tmp_path, workload):
    path = tmp_path / "w.jsonl"
    write_workload(workload, path)
    read = read_trace(path, mode=Mode.WHOLE_BLOCKS)
    for written, back in zip(workload.requests, read.requests, strict=True):
        whole = written.input_tokens // BLOCK_TOKENS
        assert back == replace(written, block_ids=written.block_ids[:whole])


def test_the_same_workload_gives_the_same_bytes(tmp_path):
    workload = generate(GeneratorKnobs(sessions=3, turns=3))
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_workload(workload, tmp_path / name)
    content = (tmp_path / "a.jsonl.gz").read_bytes()
    assert content == (tmp_path / "b.jsonl.gz").read_bytes()
    assert content[4:8] == bytes(4)  # no time of writing in the gzip header
    assert gzip.decompress(content).startswith(b'{"format":"cxlbench-workload","version":1,')


def test_a_line_holds_runs_of_ids_so_long_prompts_stay_short(tmp_path):
    path = tmp_path / "w.jsonl"
    workload = generate(GeneratorKnobs(sessions=2, turns=2, shared_system_tokens=100_000))
    write_workload(workload, path)
    lines = path.read_text().splitlines()
    assert len(json.loads(lines[-1])["block_runs"]) == 2
    assert max(map(len, lines)) < 300


def test_a_generated_workload_reads_back_in_larger_blocks(tmp_path):
    path = tmp_path / "w.jsonl"
    write_workload(generate(GeneratorKnobs(block_tokens=16)), path)
    coarse = read_trace(path, mode=Mode.WHOLE_BLOCKS, block_tokens=64)
    at_once = generate(GeneratorKnobs(block_tokens=64))
    assert [len(request.block_ids) for request in coarse.requests] == [
        len(request.block_ids) for request in at_once.requests
    ]
    with pytest.raises(TraceError, match="full blocks of 16 tokens only"):
        open_trace(path, mode=Mode.WHOLE_BLOCKS, block_tokens=8)


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path):
    workload = generate(GeneratorKnobs(sessions=1, turns=1))
    with pytest.raises(TraceError, match=r"w.jsonl: cannot be written: No such file or directory"):
        write_workload(workload, tmp_path / "no" / "folder" / "w.jsonl")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "w.jsonl"
    write_workload(generate(GeneratorKnobs(sessions=1, turns=1)), path)
    before = path.read_bytes()

    def full_disk(work, out, progress):
        out.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cxlbench.harness.traces.own_format._write_lines", full_disk)
    with pytest.raises(TraceError, match="cannot be written: No space left on device"):
        write_workload(generate(GeneratorKnobs(sessions=2)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
