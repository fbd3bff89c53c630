"""Bad trace files: each is refused with the file, the line, and what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlbench.harness.requests import Mode
from cxlbench.harness.traces import FORMATS, TraceError, detect_format, read_trace

MOONCAKE = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}
LMCACHE = {
    "timestamp": 0,
    "session_id": 0,
    "turn": 1,
    "input_length": 130,
    "output_length": 1,
    "hash_ids": [0],
}
CALL = {"t": 0, "type": "n", "in": 130, "out": 1, "hash_ids": [1, 2]}
DELTA = {"t": 0, "type": "s", "in": 130, "out": 1, "keep": 0, "new": [[1, 2]]}
HEADER = {
    "format": "cxlbench-workload",
    "version": 1,
    "name": "w",
    "block_tokens": 16,
    "mode": "whole-blocks",
    "has_sessions": True,
    "has_ids": True,
    "requests": 1,
}
OWN = {
    "request_id": 0,
    "session": "a",
    "turn": 1,
    "arrival_s": 0,
    "input_tokens": 40,
    "output_tokens": 1,
    "think_s": 0,
    "after": None,
    "block_runs": [[0, 2]],
}


def session(*requests, **fields):
    return {
        "id": "s1",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(requests),
        **fields,
    }


def without(line, field):
    return {name: value for name, value in line.items() if name != field}


def text(*lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def refused(path: Path, content: str | bytes, **options) -> TraceError:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, mode=Mode.WHOLE_BLOCKS, **options)
    assert str(caught.value).startswith(str(path))
    return caught.value


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (without(MOONCAKE, "hash_ids"), "missing required field `hash_ids`"),
        (without(MOONCAKE, "output_length"), "missing required field `output_length`"),
        ({**MOONCAKE, "input_length": -1}, "Expected `int` >= 0 - at `$.input_length`"),
        ({**MOONCAKE, "output_length": "5"}, "Expected `int`, got `str` - at `$.output_length`"),
        ({**MOONCAKE, "timestamp": -3}, "`$.timestamp`"),
        ({**MOONCAKE, "timestamp": 1e300}, "`$.timestamp`"),
        ({**MOONCAKE, "hash_ids": [0]}, "1 hash_ids for input_length 700"),
        ({**MOONCAKE, "hash_ids": [0, 1, 2]}, "in blocks of 512 tokens there are 2"),
        ([1, 2], "Expected `object`, got `array`"),
    ],
)
def test_a_bad_mooncake_line_is_named(path, bad, what):
    error = refused(path, text(MOONCAKE, MOONCAKE, bad, MOONCAKE))
    assert error.line == 3
    assert what in error.what


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({**LMCACHE, "turn": 2, "hash_ids": []}, "there are 1 full blocks of 128 tokens"),
        ({**LMCACHE, "turn": 0}, "`$.turn`"),
        ({**LMCACHE, "turn": 4}, "turn 4 at 0.0 s follows turn 5 at 2.0 s"),
        ({**LMCACHE, "turn": 6, "timestamp": 1000}, "turn 6 at 1.0 s follows turn 5 at 2.0 s"),
    ],
)
def test_a_bad_lmcache_line_is_named(path, bad, what):
    error = refused(path, text({**LMCACHE, "turn": 5, "timestamp": 2000}, bad))
    assert error.line == 2
    assert what in error.what


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (session(without(CALL, "in"), id="x"), "missing required field `in` - at `$.requests[0]`"),
        (session({**CALL, "out": -1}, id="x"), "`$.requests[0].out`"),
        (session({**CALL, "type": "q"}, id="x"), "Invalid value 'q' - at `$.requests[0].type`"),
        (
            session({**CALL, "hash_ids": [1]}, id="x"),
            "1 block ids for 130 input tokens: there are 2",
        ),
        (session(without(CALL, "hash_ids"), id="x"), "neither hash_ids nor keep and new"),
        (session({**DELTA, "keep": 1}, id="x"), "keeps 1 blocks, but the one before has 0"),
        (
            session({**DELTA, "new": [[1, 10**12]]}, id="x"),
            "Expected `int` <= 100000000 - at `$.requests[0].new[0][1]`",
        ),
        (session({**DELTA, "new": [[1, -2]]}, id="x"), "Expected `int` >= 0"),
        (
            session({**DELTA, "in": 64 * 10**11, "new": [[1, 10**11]]}, id="x"),
            "Expected `int` <= 100000000 - at `$.requests[0].in`",
        ),
        (session({**CALL, "t": 5}, {**CALL, "t": 4}, id="x"), "t=4.0 follows one at t=5.0"),
        (session(CALL, id="x", block_size=32), "block_size 32 after 64"),
        (session(CALL, id="x", hash_id_scope="x"), "neither 'local' nor 'global'"),
        (session(CALL), "session 's1' is there twice"),
    ],
)
def test_a_bad_coding_agent_session_is_named(path, bad, what):
    error = refused(path, text(session(CALL), bad))
    assert error.line == 2
    assert what in error.what


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("2023-11-16 18:15:47,1", "not enough values"),
        ("yesterday,1,2", "yesterday"),
        ("2023-11-16 18:15:47,1,x", "'x'"),
        ("2023-11-16 18:15:47,-1,2", "a length of -1 tokens"),
        (f"2023-11-16 18:15:47,1,{10**11}", "lengths are 0 to 100000000"),
        ("2023-11-16 18:15:45,1,2", "1.0 s before the first row"),
        ("2023-11-16 18:15:47+00:00,1,2", "offset"),
    ],
)
def test_a_bad_azure_row_is_named(path, row, what):
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n"
    error = refused(path, head + row + "\n", block_tokens=128)
    assert error.line == 3
    assert what in error.what


@pytest.mark.parametrize(
    ("header", "line", "number", "what"),
    [
        ({**HEADER, "version": 2}, OWN, 1, "reads 'cxlbench-workload' version 1"),
        (without(HEADER, "mode"), OWN, 1, "missing required field `mode`"),
        ({**HEADER, "mode": "half"}, OWN, 1, "Invalid enum value 'half'"),
        ({**HEADER, "requests": 2}, OWN, 2, "ends after 1 requests, its header says 2: truncated"),
        (HEADER, {**OWN, "request_id": 1}, 2, "request_id 1 where 0 is expected"),
        (HEADER, {**OWN, "after": 0}, 2, "after=0 is not an earlier request"),
        (HEADER, {**OWN, "block_runs": [[0, 3]]}, 2, "3 block ids for 40 tokens"),
        (HEADER, {**OWN, "block_runs": [[0, 10**7]]}, 2, "10000000 block ids for 40"),
        (HEADER, {**OWN, "block_runs": [[4, 1], [4, 1]]}, 2, "id 4 stands behind two"),
    ],
)
def test_a_bad_line_of_the_own_format_is_named(path, header, line, number, what):
    error = refused(path, text(header, line))
    assert error.line == number
    assert what in error.what


def test_a_malformed_line_is_named(path):
    error = refused(path, text(MOONCAKE) + '{"timestamp": 1, "input_length": oops}\n')
    assert error.line == 2
    assert "not one JSON object on a line" in error.what
    assert "cut off" not in error.what


def test_a_last_line_that_was_cut_off_is_named(path):
    error = refused(path, text(MOONCAKE, MOONCAKE)[:-20])
    assert error.line == 2
    assert "may have been cut off" in error.what


def test_bytes_that_are_not_utf8_are_named(path):
    error = refused(path, text(MOONCAKE).encode() + b'{"timestamp": 0, "\xff": 1}\n')
    assert error.line == 2


def test_absurdly_nested_json_is_refused_like_any_other_malformed_line(path):
    error = refused(path, text(MOONCAKE) + '{"x": ' + "[" * 100_000 + "\n")
    assert error.line == 2
    assert refused(path, "[" * 100_000).line == 1


def test_a_truncated_gzip_file_is_named_as_such(path):
    packed = gzip.compress(text(*[{**MOONCAKE, "timestamp": n * n} for n in range(3000)]).encode())
    error = refused(path, packed[: len(packed) // 2])
    assert "truncated" in error.what
    assert error.line is not None
    assert 100 < error.line < 3000


def test_a_damaged_gzip_file_is_named_as_such(path):
    packed = bytearray(gzip.compress(text(*[MOONCAKE] * 2000).encode(), mtime=0))
    packed[-6] ^= 0xFF  # the checksum
    assert "damaged" in refused(path, bytes(packed)).what
    assert "damaged" in refused(path, b"\x1f\x8bnot gzip at all").what


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_named_as_such(path, content):
    assert refused(path, content).what == "the file is empty"


def test_an_unknown_format_shows_what_the_file_looks_like_and_what_is_known(path):
    error = refused(path, text({"question_id": 81, "turns": ["Compose", "Rewrite"]}))
    assert "JSON with the keys question_id, turns" in error.what
    assert all(known.name in error.what for known in FORMATS)
    assert error.what.count("lmcache-agent") == 1
    assert "text, beginning with 'hello" in refused(path, "hello\n").what
    assert "JSON, but not an object" in refused(path, "[1]\n").what


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\x7fELF\x02\x01\x01\x00", "control characters"), (b"\xff\xfe\x01\n", "not UTF-8")],
)
def test_a_binary_file_is_called_so_and_not_printed(path, content, said):
    what = refused(path, content).what
    assert f"{said} (a binary file?)" in what
    assert what.isascii()
    assert what.replace("\n", "").isprintable()


def test_json_that_spans_lines_is_answered_with_what_to_do(path):
    assert "jq -c" in refused(path, json.dumps(session(CALL), indent=1)).what


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"gone.*cannot be read: No such file"):
        detect_format(tmp_path / "gone")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        detect_format(tmp_path)


@pytest.mark.parametrize(
    ("line", "block_tokens", "what"),
    [
        (MOONCAKE, 100, "multiple or a divisor of 512"),
        (LMCACHE, 64, "full blocks of 128 tokens only"),
        (session(CALL), 16, "full blocks of 64 tokens only"),
        (session(CALL), 100, "only to a multiple of 64"),
    ],
)
def test_blocks_that_a_trace_does_not_determine_are_refused(path, line, block_tokens, what):
    assert what in refused(path, text(line), block_tokens=block_tokens).what


SAMPLES = (
    text(MOONCAKE, MOONCAKE),
    text(LMCACHE, {**LMCACHE, "turn": 2}),
    text(session(CALL, DELTA)),
    text(HEADER, OWN),
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n",
)


@settings(max_examples=300)
@given(st.sampled_from(SAMPLES), st.data())
def test_whatever_is_done_to_a_file_it_is_read_or_refused(tmp_path, sample, data):
    content = bytearray(sample.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.sampled_from([b"", b"-", b"9", b"x", b"\n", b'"', b",", b"[", b"\xff"]))
        content[place : place + data.draw(st.integers(0, 2))] = new
        if not content:
            break
    path = tmp_path / "fuzzed"
    path.write_bytes(bytes(content))
    try:
        read_trace(path, mode=Mode.WHOLE_BLOCKS, block_tokens=128 if "TIME" in sample else None)
    except TraceError as error:
        assert str(path) in str(error)  # noqa: PT017 - both outcomes are right
