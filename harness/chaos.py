"""Kills and stops the parts of a deployment at random, under load, and checks what it promises.

Each round draws one or two faults from its own seed: SIGKILL or SIGSTOP of a worker, a node or
Master. When everything is back, the tier must work again, and then, with the load paused, nothing
may be held for anybody: no slot, lease, pin, frame, buffer byte, grant, file or mapped segment. At
no time may a worker get a wrong byte, or wait longer than an operation may take: a load its
deadline, a lookup and a store the limits of the calls that they consist of (``operation_limit_s``).
Over all rounds, private memory and descriptors of each part stay what they were. Worker 0 is
stopped but never killed (unless it is the only one): what leaks with every crash of others shows
there. Workers keep no record of their timing, and before memory is looked at they let their own
buffers go and give freed memory back: what grows then is the tier's.

The faults of a round depend on seed and round only, so that a round can be replayed; how the load
meets them does not. Units: s of the machine's clock, bytes.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cxlbench.harness.chaos_parts import Fault, Part, Resident, Samples, WorkerProcess, draw_faults
from cxlbench.harness.chaos_worker import operation_limit_s
from cxlbench.harness.deployment import SPEC_FILE, DeploymentSpec
from cxlbench.harness.deployment_status import read_status
from cxlbench.harness.supervisor import Deployment

Progress = Callable[[str, int, int], None]

COME_BACK_S = 30.0
"""How long parts may take to start, on a host that does other things, too."""
REST_S = 4.0
"""Beside twice the deadline: until leases and reservations of the dead run out, and a flush."""
QUARTERS_FROM = 20
"""Rounds from which on quarters are compared."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What was broken in a round, and by which faults."""

    round: int
    what: str
    faults: str


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """What happened, and what was broken."""

    seed: int
    rounds: int
    faults: dict[str, int]
    turns: int
    hits: int
    missed: int
    stored: int
    checked_bytes: int
    slowest_back_s: float
    """From the end of a round's last fault until the tier worked again for every worker."""
    slowest_rest_s: float
    """From the end of the load until nothing was held."""
    residents: tuple[Resident, ...]
    violations: tuple[Violation, ...]
    elapsed_s: float

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations


class Chaos:
    """The loop. ``run`` starts a deployment of ``spec`` and ends it."""

    def __init__(
        self, spec: DeploymentSpec, *, workers: int, seed: int, progress: Progress = lambda *_: None
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.progress = progress
        self.deployment = Deployment(spec)
        self.workers: list[WorkerProcess] = []
        self._worker_count = workers
        self._round = 0
        self._faults: list[Fault] = []
        self._violations: list[Violation] = []
        self._totals: Counter[str] = Counter()
        self._seen: dict[int, dict[str, int]] = {}
        self._probes = 0
        self._samples = Samples()
        self._back_s = 0.0
        self._rest_s = 0.0

    def run(self, rounds: int, *, first: int = 0) -> ChaosReport:
        """Do the rounds ``first`` and following; stop at the first that breaks a promise."""
        begin_s = time.monotonic()
        counts: Counter[str] = Counter()
        done = 0
        try:
            self.deployment.start()
            for number in range(self._worker_count):
                self.workers.append(WorkerProcess(self.spec, number, self.seed))
            for worker in self.workers:
                self._await(worker, "ready", COME_BACK_S + 20)
            for self._round in range(first, first + rounds):
                self._one_round()
                counts.update(f"{fault.how} {fault.part.role}" for fault in self._faults)
                done += 1
                self.progress("chaos, rounds", done, rounds)
                if self._violations:
                    break
        finally:
            for worker in self.workers:
                worker.end()
            for number in range(self._worker_count):
                if not self._violations:
                    (self.spec.run_dir / f"worker{number}.log").unlink(missing_ok=True)
            self.deployment.failed |= bool(self._violations)
            self.deployment.stop()
        residents = self._samples.quarters()
        if done >= QUARTERS_FROM:
            for grown in residents:
                if not grown.flat:
                    self._broken(
                        f"{grown.part} grew: {grown.first_bytes} B to {grown.last_bytes} B, "
                        f"{grown.first_descriptors} to {grown.last_descriptors} descriptors"
                    )
        return ChaosReport(
            seed=self.seed,
            rounds=done,
            faults=dict(sorted(counts.items())),
            turns=self._totals["turns"],
            hits=self._totals["hits"],
            missed=self._totals["missed"],
            stored=self._totals["stored"],
            checked_bytes=self._totals["checked_bytes"],
            slowest_back_s=self._back_s,
            slowest_rest_s=self._rest_s,
            residents=tuple(residents),
            violations=tuple(self._violations),
            elapsed_s=time.monotonic() - begin_s,
        )

    # -- one round ------------------------------------------------------------------------------

    def _one_round(self) -> None:
        spec = self.spec
        self._faults = draw_faults(
            self.seed,
            self._round,
            workers=self._worker_count,
            nodes=spec.nodes,
            deadline_s=spec.deadline_s,
        )
        begin_s = time.monotonic()
        steps = [(fault.after_s, False, fault) for fault in self._faults]
        steps += [(fault.after_s + fault.for_s, True, fault) for fault in self._faults]
        for at_s, back, fault in sorted(steps, key=lambda step: step[:2]):
            self._listen(until_s=begin_s + at_s)
            self._bring_back(fault) if back else self._strike(fault)
        struck_s = time.monotonic()
        try:
            self.deployment.wait_ready(patience_s=COME_BACK_S)
        except Exception as error:
            self._broken(str(error))
            return
        for fault in self._faults:
            if fault.how == "kill" and fault.part.role == "worker":
                self._await(self.workers[fault.part.number], "ready", COME_BACK_S + 10)
        for worker in self.workers:
            self._probe(worker)
        self._back_s = max(self._back_s, time.monotonic() - struck_s)
        self._check_at_rest()
        for ended in self.deployment.ended():
            self._broken(ended.line())
        for worker in self.workers:
            if worker.process.poll() is not None:
                self._broken(f"worker {worker.number} ended: {worker.process.returncode}")
            else:
                worker.tell("go")

    def _strike(self, fault: Fault) -> None:
        part, kill = fault.part, fault.how == "kill"
        number = signal.SIGKILL if kill else signal.SIGSTOP
        if part.role != "worker":
            self.deployment.kill(part.role, part.number, number)
            return
        worker = self.workers[part.number]
        worker.process.send_signal(number)
        if kill:
            worker.process.wait()
        else:
            worker.stopped_s.append((time.monotonic(), float("inf")))

    def _bring_back(self, fault: Fault) -> None:
        part, kill = fault.part, fault.how == "kill"
        if part.role != "worker":
            if kill:
                self.deployment.restart(part.role, part.number, wait=False)
            else:
                self.deployment.kill(part.role, part.number, signal.SIGCONT)
            return
        worker = self.workers[part.number]
        if kill:
            worker.read()
            self._take_news(worker)
            worker.end()
            self._seen.pop(part.number, None)
            self.workers[part.number] = WorkerProcess(self.spec, part.number, self.seed)
        else:
            worker.process.send_signal(signal.SIGCONT)
            begin_s, _ = worker.stopped_s.pop()
            worker.stopped_s.append((begin_s, time.monotonic()))

    # -- workers --------------------------------------------------------------------------------

    def _listen(self, *, until_s: float) -> None:
        """Take in what workers say until then, or until one has said something."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
            while (left_s := until_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    key.data.read()
                    self._take_news(key.data)
                    if key.data.process.poll() is not None:
                        selector.unregister(key.fileobj)

    def _take_news(self, worker: WorkerProcess) -> None:
        """Judge what a worker has found; answers to commands stay in its inbox."""
        kept = []
        for news in worker.inbox:
            if news["event"] == "wrong":
                self._broken(f"worker {worker.number} got wrong bytes for {news['key']}")
            elif news["event"] == "slow":
                self._judge_slow(worker, news)
            else:
                kept.append(news)
        worker.inbox = kept

    def _judge_slow(self, worker: WorkerProcess, news: dict[str, Any]) -> None:
        begin_s, end_s = news["begin_s"], news["end_s"]
        took_s = end_s - begin_s
        for stop_s, go_s in worker.stopped_s:
            took_s -= max(0.0, min(end_s, go_s) - max(begin_s, stop_s))
        if took_s > operation_limit_s(self.spec, news["work"]):
            self._broken(f"a {news['work']} of worker {worker.number} took {took_s:.2f} s")

    def _await(self, worker: WorkerProcess, event: str, within_s: float) -> dict[str, Any] | None:
        """Return a worker's next answer of a kind; None, and a violation, if it does not come."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            for news in worker.inbox:
                if news["event"] == event:
                    worker.inbox.remove(news)
                    return news
            if worker.process.poll() is not None:
                break
            self._listen(until_s=min(end_s, time.monotonic() + 0.01))
        self._broken(f"worker {worker.number} does not say {event!r}")
        return None

    def _probe(self, worker: WorkerProcess) -> None:
        """Let a worker store and read a fresh chain until that works."""
        end_s = time.monotonic() + COME_BACK_S
        while not self._violations:
            self._probes += 1
            worker.tell(f"probe {self._round * 1000 + self._probes % 1000}")
            answer = self._await(worker, "probe", COME_BACK_S)
            if answer is None or answer["works"]:
                return
            if time.monotonic() > end_s:
                self._broken(f"the tier does not work again for worker {worker.number}")

    # -- at rest --------------------------------------------------------------------------------

    def _check_at_rest(self) -> None:
        if self._violations:
            return
        for worker in self.workers:
            worker.tell("pause")
        for worker in self.workers:
            answer = self._await(worker, "paused", 3 * self.spec.deadline_s + COME_BACK_S)
            if answer is None:
                return
            self._add(worker.number, answer["tally"])
            if answer["held"]:
                self._broken(f"worker {worker.number} holds {answer['held']}")
        begin_s = time.monotonic()
        limit_s = 2 * self.spec.deadline_s + REST_S
        while (left := self._held()) and time.monotonic() < begin_s + limit_s:
            time.sleep(0.02)
        if left:
            self._broken(f"{limit_s:g} s after the load: {left}")
        self._rest_s = max(self._rest_s, time.monotonic() - begin_s)
        self._check_files()
        self._sample()

    def _held(self) -> str:
        """Return what the services hold, or what else is not as it should be."""
        status = read_status(self.spec)
        found = [f"{part.name} {part.trouble}" for part in status.parts if part.trouble]
        for part in status.parts:
            for name, value in part.figures.items():
                wrong = name.startswith("held: ") or name in (
                    "grants",
                    "refused peers",
                    "failed messages",
                )
                if wrong and value:
                    found.append(f"{part.name}: {name} {value}")
        return ", ".join(found)

    def _check_files(self) -> None:
        spec = self.spec
        stems = ["master", *(f"node{number}" for number in range(spec.nodes))]
        kinds = ("sock", "lock", "log")
        known = {f"{stem}.{kind}" for stem in stems for kind in kinds} | {SPEC_FILE, "up.lock"}
        known |= {f"worker{number}.log" for number in range(self._worker_count)}
        others = {path.name for path in spec.run_dir.iterdir() if not path.is_dir()} - known
        if others:
            self._broken(f"files are left in the run directory: {sorted(others)}")
        for worker in self.workers:
            maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
            segments = maps.count("memfd:cxlbench")
            if segments > spec.nodes * (spec.devices_per_node + 1):
                self._broken(f"worker {worker.number} maps {segments} segments of nodes")

    def _sample(self) -> None:
        parts = [Part("master"), *(Part("node", n) for n in range(self.spec.nodes))]
        for part in parts:
            assert part.role != "worker"
            self._samples.take(str(part), self.deployment.pid(part.role, part.number))
        self._samples.take("worker 0", self.workers[0].process.pid)

    def _add(self, number: int, tally: dict[str, int]) -> None:
        """Add what a worker has done since its last report."""
        before = self._seen.get(number, {})
        self._totals.update({name: n - before.get(name, 0) for name, n in tally.items()})
        self._seen[number] = tally

    def _broken(self, what: str) -> None:
        faults = "; ".join(str(fault) for fault in self._faults)
        self._violations.append(Violation(self._round, what, faults))
