"""A seeded generator of multi-turn conversations, with the knobs of AIPerf-like load tools.

HyMCache §5 evaluates on synthetic multi-turn traffic: sessions share a system prompt, each turn
appends the answer before it and some new input, so prefixes grow and are read once a turn.

The prompt of turn 1 is the shared system prompt plus ``first_input_tokens``; that of each later
turn is the whole history (earlier prompts and answers) plus ``turn_input_tokens`` of new input.
Lengths are drawn from normal distributions, cut at 1 token; think times are cut at 0 s. Every
session draws from a generator of its own, derived from the seed and its number: more sessions or
turns leave those before unchanged.

Units: tokens and seconds. The workload is in mode *whole blocks*. Arrivals, for an open loop,
allot ``service_s`` to each request, since a generator cannot know how long an engine takes; a
closed loop ignores them except for each session's first. Left out: text, sub-agents, context that
shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from random import Random

from cxlbench.harness.requests import Mode, Request, Workload, WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorKnobs:
    """What to generate. All numbers are validated; the error names the knob and its value.

    Attributes:
        sessions: number of conversations, 1 or more.
        turns: turns of each conversation, 1 or more.
        shared_system_tokens: leading tokens that all sessions have in common.
        first_input_tokens: mean input of turn 1, without the system prompt.
        first_input_stddev: its standard deviation.
        turn_input_tokens: mean new input of turn 2.
        turn_input_stddev: standard deviation of the new input of every later turn.
        turn_input_growth: factor by which that mean grows from each turn to the next.
        output_tokens: mean length of an answer.
        output_stddev: its standard deviation.
        think_s: mean pause between an answer and the next turn.
        think_stddev_s: its standard deviation.
        session_spread_s: sessions start at random within so many seconds; 0 is all at once.
        session_rate_per_s: or else sessions start as a Poisson process of this rate.
        service_s: time that an open loop's arrivals allot to each request.
        block_tokens: tokens in a block.
        seed: same knobs and seed, same workload, on every machine.

    Raises:
        WorkloadError: a knob is out of its range.
    """

    sessions: int = 32
    turns: int = 5
    shared_system_tokens: int = 1024
    first_input_tokens: float = 1024
    first_input_stddev: float = 0
    turn_input_tokens: float = 256
    turn_input_stddev: float = 0
    turn_input_growth: float = 1
    output_tokens: float = 128
    output_stddev: float = 0
    think_s: float = 1
    think_stddev_s: float = 0
    session_spread_s: float = 0
    session_rate_per_s: float | None = None
    service_s: float = 0
    block_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for knob in fields(self):
            value = getattr(self, knob.name)
            if value is None and knob.name == "session_rate_per_s":
                continue
            whole = knob.name in WHOLE_KNOBS
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise WorkloadError(
                    f"{knob.name}={value!r}: must be a {'whole ' if whole else ''}number"
                )
            least = LEAST.get(knob.name, 0)
            if knob.name != "seed" and not (least <= value < math.inf):
                finite = "" if whole else "finite and "
                raise WorkloadError(f"{knob.name}={value}: must be {finite}{least} or more")
        if self.turn_input_growth == 0 or self.session_rate_per_s == 0:
            knob_name = "turn_input_growth" if self.turn_input_growth == 0 else "session_rate_per_s"
            raise WorkloadError(f"{knob_name}=0: must be above 0")
        if self.session_rate_per_s is not None and self.session_spread_s > 0:
            raise WorkloadError(
                f"session_rate_per_s={self.session_rate_per_s} and "
                f"session_spread_s={self.session_spread_s}: choose one way to start sessions"
            )


MOST_TOKENS = 10**8

WHOLE_KNOBS = frozenset({"sessions", "turns", "shared_system_tokens", "block_tokens", "seed"})
LEAST = {
    "sessions": 1,
    "turns": 1,
    "block_tokens": 1,
    "first_input_tokens": 1,
    "turn_input_tokens": 1,
    "output_tokens": 1,
}


@dataclass(frozen=True, slots=True)
class _Turn:
    session: int
    turn: int
    arrival_s: float
    think_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def generate(
    knobs: GeneratorKnobs,
    *,
    name: str = "generated",
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Workload:
    """Return the workload that ``knobs`` describe.

    Block ids count from 0: first the whole blocks of the shared system prompt, then each
    session's own, session by session.
    """
    turns: list[_Turn] = []
    next_block = knobs.shared_system_tokens // knobs.block_tokens
    for session, start_s in enumerate(_session_starts(knobs)):
        for turn in _session(knobs, session, start_s, next_block):
            turns.append(turn)
            last_block = turn.block_ids[-1] if turn.block_ids else -1
        next_block = max(next_block, last_block + 1)
        progress("making sessions", session + 1, knobs.sessions)
    turns.sort(key=lambda turn: turn.arrival_s)
    requests: list[Request] = []
    previous: dict[int, int] = {}
    for request_id, turn in enumerate(turns):
        requests.append(
            Request(
                request_id=request_id,
                session=f"s{turn.session}",
                turn=turn.turn,
                arrival_s=turn.arrival_s,
                input_tokens=turn.input_tokens,
                output_tokens=turn.output_tokens,
                block_ids=turn.block_ids,
                think_s=turn.think_s,
                after=previous.get(turn.session),
            )
        )
        previous[turn.session] = request_id
    return Workload(name, knobs.block_tokens, Mode.WHOLE_BLOCKS, tuple(requests), has_sessions=True)


def _session_starts(knobs: GeneratorKnobs) -> Iterator[float]:
    random = Random(f"cxlbench/{knobs.seed}/starts")
    start_s = 0.0
    for _ in range(knobs.sessions):
        if knobs.session_rate_per_s is None:
            yield random.uniform(0, knobs.session_spread_s)
        else:
            start_s += random.expovariate(knobs.session_rate_per_s)
            yield start_s


def _session(
    knobs: GeneratorKnobs, session: int, start_s: float, first_block: int
) -> Iterator[_Turn]:
    random = Random(f"cxlbench/{knobs.seed}/{session}")
    shared_blocks = knobs.shared_system_tokens // knobs.block_tokens
    history_tokens = knobs.shared_system_tokens
    arrival_s = start_s
    think_s = 0.0
    mean = knobs.turn_input_tokens
    for turn in range(1, knobs.turns + 1):
        if turn == 1:
            new = _tokens(random, knobs.first_input_tokens, knobs.first_input_stddev)
        else:
            new = _tokens(random, mean, knobs.turn_input_stddev)
            mean *= knobs.turn_input_growth
        input_tokens = history_tokens + new
        output_tokens = _tokens(random, knobs.output_tokens, knobs.output_stddev)
        own_blocks = input_tokens // knobs.block_tokens - shared_blocks
        yield _Turn(
            session=session,
            turn=turn,
            arrival_s=arrival_s,
            think_s=think_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            block_ids=(*range(shared_blocks), *range(first_block, first_block + own_blocks)),
        )
        history_tokens = input_tokens + output_tokens
        think_s = max(0.0, random.gauss(knobs.think_s, knobs.think_stddev_s))
        arrival_s += knobs.service_s + think_s


def _tokens(random: Random, mean: float, stddev: float) -> int:
    drawn = random.gauss(mean, stddev)
    if drawn > MOST_TOKENS:
        raise WorkloadError(
            f"a turn would add {drawn:.3g} tokens, more than {MOST_TOKENS}: lower the means, "
            "turn_input_growth or turns"
        )
    return max(1, round(drawn))
