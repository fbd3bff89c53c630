"""A seeded sample of a coding-agent trace: some of its sessions, and of each its first requests.

The whole file can hold far more references than a run should have, so sessions are chosen by the
number of their line before anything is decoded. A session ends early where the next request would
exceed its share of the references, or where a prompt is longer than the engine takes: later prompts
of it contain that one. What waits for a request that is left out waits for nothing.

Units: tokens, blocks (references). Left out: sampling by the lengths of sessions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

from cxlbench.harness.requests import Mode, Request, Workload
from cxlbench.harness.traces.coding_agent import DELTA, VERBATIM
from cxlbench.harness.traces.lines import TraceError, numbered_lines
from cxlbench.harness.traces.reading import detect_format
from cxlbench.harness.traces.stream import Asked, trace_name


def sample_sessions(
    path: Path,
    *,
    sessions: int,
    references: int,
    block_tokens: int,
    most_input_tokens: int,
    seed: int,
) -> Workload:
    """Return ``sessions`` sessions of a trace, each with up to ``references`` block references.

    Raises:
        TraceError: the file is no coding-agent trace, cannot be read, or has too few sessions.
    """
    known = detect_format(path)
    if known not in (VERBATIM, DELTA):
        raise TraceError(path, None, f"sessions are sampled from agents' traces, not {known.name}")
    lines = [number for number, _ in numbered_lines(path)]
    if len(lines) < sessions:
        raise TraceError(path, None, f"{sessions} sessions asked, the file has {len(lines)}")
    chosen = frozenset(Random(f"cxlbench/sample/{seed}").sample(lines, sessions))
    stream = known.open(
        Asked(path, Mode.WHOLE_BLOCKS, block_tokens=block_tokens, only_lines=chosen)
    )
    kept: list[Request] = []
    numbers: dict[int, int] = {}
    used: dict[str, int] = {}
    ended: set[str] = set()
    for request in stream.requests:
        session = request.session
        count = used.get(session, 0) + len(request.block_ids)
        if request.input_tokens > most_input_tokens or count > references:
            ended.add(session)
        if session in ended:
            continue
        used[session] = count
        numbers[request.request_id] = len(kept)
        kept.append(request)
    order = sorted(range(len(kept)), key=lambda place: kept[place].arrival_s)
    place_of = {old: new for new, old in enumerate(order)}
    requests = []
    for new, old in enumerate(order):
        request = kept[old]
        before = None if request.after is None else numbers.get(request.after)
        after = None if before is None else place_of[before]
        requests.append(
            dataclasses.replace(
                request, request_id=new, after=after if after is not None and after < new else None
            )
        )
    return Workload(
        f"{trace_name(path)}-{sessions}",
        block_tokens,
        Mode.WHOLE_BLOCKS,
        tuple(requests),
        has_sessions=True,
    )
