"""One GPU with continuous batching: steps over chunks of prompts and tokens of answers.

Each step takes one token of every answering sequence, then chunks of prompts in order of arrival
until the token budget is spent (chunked prefill). Steps follow each other while there is work. A
sequence's first token comes with the last chunk of its prompt.

Units: tokens, s. Left out: priorities, speculative decoding, steps that overlap.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from cxlbench.emu.clock import Clock, JobSet
from cxlbench.emu.sync import Signal
from cxlbench.harness.serve.admission import Admission
from cxlbench.harness.serve.gpu_pool import GpuPool
from cxlbench.harness.serve.roofline import Roofline, StepWork


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on a GPU."""

    prompt_left: int
    """Tokens of the prompt that are to be computed."""
    context: int
    """Tokens whose KV is there."""
    answer_left: int
    """Tokens of the answer that are to come."""
    started: Signal[None]
    """The first chunk of the prompt begins."""
    prefilled: Signal[None]
    ended: Signal[None]
    started_s: float = -1.0
    first_token_s: float = -1.0
    last_token_s: float = -1.0


@dataclass(slots=True)
class ServerCounters:
    """What a GPU did."""

    steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    token_gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Between two tokens of one answer."""


class GpuServer:
    """One GPU. ``start`` sequences on it; its loop runs while there are any."""

    def __init__(
        self, clock: Clock, jobs: JobSet, roofline: Roofline, pool: GpuPool, *, name: str
    ) -> None:
        self.clock = clock
        self.name = name
        self.roofline = roofline
        self.pool = pool
        self.counters = ServerCounters()
        self._jobs = jobs
        self._prompts: list[Sequence] = []
        self._answers: list[Sequence] = []
        self._running = False
        self.admission = Admission(clock, self._has_tokens_left)

    def _has_tokens_left(self) -> bool:
        """Whether the next step could take tokens of one more prompt, and one more sequence."""
        engine = self.roofline.engine
        waiting = sum(sequence.prompt_left for sequence in self._prompts)
        running = len(self._prompts) + len(self._answers)
        return waiting < engine.max_batched_tokens and running < engine.max_running

    def start(self, *, prompt_tokens: int, context: int, answer_tokens: int) -> Sequence:
        """Put a sequence into the batch; at least one token of its prompt must be computed."""
        if prompt_tokens < 1 or answer_tokens < 1:
            raise ValueError(
                f"{self.name}: a sequence computes at least one token of its prompt and of its "
                f"answer, got {prompt_tokens} and {answer_tokens}"
            )
        clock = self.clock
        sequence = Sequence(
            prompt_tokens, context, answer_tokens, Signal(clock), Signal(clock), Signal(clock)
        )
        self._prompts.append(sequence)
        if not self._running:
            self._running = True
            self._jobs.spawn(self._steps())
        return sequence

    async def _steps(self) -> None:
        clock, counters = self.clock, self.counters
        budget = self.roofline.engine.max_batched_tokens
        while self._prompts or self._answers:
            answering = list(self._answers)
            chunks = self._chunks(budget - len(answering))
            work = StepWork()
            for sequence in answering:
                work.add_chunk(1, sequence.context)
            for sequence, tokens in chunks:
                if sequence.started_s < 0:
                    sequence.started_s = clock.now()
                    sequence.started.set(None)
                work.add_chunk(tokens, sequence.context)
            step_s = self.roofline.step_s(work)
            counters.steps += 1
            counters.busy_s += step_s
            await clock.sleep(step_s)
            now = clock.now()
            for sequence, tokens in chunks:
                sequence.prompt_left -= tokens
                sequence.context += tokens
                counters.prompt_tokens += tokens
                if not sequence.prompt_left:
                    self._prompts.remove(sequence)
                    self._answers.append(sequence)
                    sequence.first_token_s = now
                    sequence.prefilled.set(None)
                    self._token(sequence, now)
            for sequence in answering:
                sequence.context += 1
                counters.token_gaps_s.append(now - sequence.last_token_s)
                self._token(sequence, now)
            self.admission.look()
        self._running = False

    def _chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks = []
        for sequence in self._prompts:
            if budget <= 0:
                break
            tokens = min(sequence.prompt_left, budget)
            budget -= tokens
            chunks.append((sequence, tokens))
        return chunks

    def _token(self, sequence: Sequence, now: float) -> None:
        sequence.last_token_s = now
        sequence.answer_left -= 1
        self.counters.answer_tokens += 1
        if not sequence.answer_left:
            self._answers.remove(sequence)
            sequence.ended.set(None)
