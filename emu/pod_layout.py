"""What a live pod consists of, and where each part lies in its shared mappings.

A live pod (native, emulated or mapped) has these mappings, each shared by the processes named:

* the *region*: device memory ``D``, by all processes. Programs own every byte of it.
* the *control* mapping, by all processes: a versioned header, the process table, and what makes a
  64-byte transfer to or from ``D`` one event: locks hashed by line, and a journal per process, so
  that a line half copied by a process that was killed can be completed by somebody else.
* one *node* mapping for each node, by the processes of that node: node-local locks and words
  (DRAM of the host), the posted write-backs, and the sets of the node's cache. Only emulated pods
  have a cache and write-backs in it.
* of a mapped pod, two more for each node, as long as the region: the *view* that programs map in
  the place of the region, and its *twin*, what the view held when it was last compared with ``D``.

Values here are plain: validated when made, turned into words of the header and back. Sizes and
offsets are bytes unless a name says otherwise. Left out: the mappings themselves (pod_mappings).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import astuple, dataclass, field, fields
from typing import ClassVar, Final, Literal, Self

LINE_BYTES: Final = 64
WORD_BYTES: Final = 8
PAGE_BYTES: Final = 4096

VERSION: Final = 1
"""Of the control and node mappings. The region has no header of the pod's."""
CONTROL_MAGIC: Final = 0x6378_6C62_706F_6431
NODE_MAGIC: Final = 0x6378_6C62_6E6F_6431
MAX_PROCESSES: Final = 64
"""Processes a node may have."""
MAX_NODES: Final = 256
HEADER_WORDS: Final = 48

Mode = Literal["native", "emulated", "mapped"]
MODES: Final[tuple[Mode, ...]] = ("native", "emulated", "mapped")
ArrivalUnit = Literal["operations", "ns", "held"]
ARRIVAL_UNITS: Final[tuple[ArrivalUnit, ...]] = ("operations", "ns", "held")

# The control mapping. A process token is its index in the process table plus one.

LINE_LOCKS: Final = 1024
"""Locks on lines of ``D``, by the line's number modulo this; each has a line of its own."""
BANDWIDTH_AT: Final = 1024
"""Word: until when (ps, CLOCK_MONOTONIC) the device's pipe is booked."""
SETTINGS_AT: Final = 1088
"""Words that operations read: see ``Settings``."""
LOCKS_AT: Final = PAGE_BYTES
PROCESSES_AT: Final = LOCKS_AT + LINE_LOCKS * LINE_BYTES
PROCESS_BYTES: Final = 512
"""A process's entry: id and incarnation, then two journals."""
PROCESS_ID_AT: Final = 0
INCARNATION_AT: Final = 8
JOURNAL_AT: Final = 128
"""What this process is writing to a line of ``D``: line, word mask, eight words."""
RESCUE_AT: Final = 256
"""The same for a line that it completes in the place of a dead process."""
JOURNAL_MASK_AT: Final = 8
JOURNAL_DATA_AT: Final = 64
RESCUING: Final = 1 << 32
"""Added to a token in a lock: the rescue journal counts."""

# Settings, as words from SETTINGS_AT

FILL_NS_AT: Final = 0
FLUSH_NS_AT: Final = 8
LINE_PS_AT: Final = 16
FENCE_ARRIVES_AT: Final = 24
ARRIVAL_UNIT_AT: Final = 32
SHORTEST_AT: Final = 40
LONGEST_AT: Final = 48
EVICTIONS_AT: Final = 56
FILLS_AT: Final = 64

# A node mapping

NODE_NUMBER_AT: Final = 16
NODE_INCARNATION_AT: Final = 24
NODE_SEED_AT: Final = 32
CLOCK_AT: Final = 128
"""Word: operations of this node, brought up to date by each process every few of its own."""
QUEUE_LOCK_AT: Final = 192
QUEUE_HEAD_AT: Final = 200
QUEUE_TAIL_AT: Final = 208
NEXT_DUE_AT: Final = 216
"""Word: nothing posted is due before this."""
SLOTS_AT: Final = 512
SLOT_BYTES: Final = 256
"""A process's own line of counters, generator and scratch."""

# A process's slot in its node's mapping

OPERATIONS_AT: Final = 0
NEXT_LOOK_AT: Final = 8
"""Word: the operation at which the process next looks at write-backs and the adversary."""
RANDOM_AT: Final = 16
REPORTED_AT: Final = 24
"""Word: operations that are in the node's clock."""
LOOKED_AT: Final = 32
"""Word: the operation at which the process last looked."""
BOOKED_UNTIL_AT: Final = 40
"""Word: until when (ns) the line that this process wrote last occupies the device's pipe."""
CHARGED_UNTIL_AT: Final = 48
"""Word: until when (ns) the operation under way takes, as far as is known."""
LAST_LINE_AT: Final = 56
COUNTERS_AT: Final = 64
SCRATCH_AT: Final = 192

# An entry of the queue of posted write-backs

POSTED_BYTES: Final = 128
POSTED_STATE_AT: Final = 0
POSTED_LINE_AT: Final = 8
POSTED_MASK_AT: Final = 16
POSTED_DUE_AT: Final = 24
POSTED_DATA_AT: Final = 64

# A set of the cache: lock, hand, in flight, (free), tags; then the lines, one after another

SET_LOCK_AT: Final = 0
SET_HAND_AT: Final = 8
SET_IN_FLIGHT_AT: Final = 16
SET_TAGS_AT: Final = 32

NEVER: Final = (1 << 62) - 1
"""A time that does not come."""


class PodLayoutError(ValueError):
    """A pod of that shape cannot be, or these files are not the pod that was asked for."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """A node's cache: ``sets`` (a power of two) times ``ways`` lines of 64 B.

    ``posted`` (a power of two) is how many write-backs can be in flight; one more makes the oldest
    land.
    """

    sets: int = 1024
    ways: int = 4
    posted: int = 256

    def __post_init__(self) -> None:
        for name in ("sets", "posted"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise PodLayoutError(f"{name} must be a power of two, got {value}")
        if not 1 <= self.ways <= 64:
            raise PodLayoutError(f"a set has 1 to 64 ways, got {self.ways}")

    @property
    def capacity_bytes(self) -> int:
        """Bytes of cached data."""
        return self.sets * self.ways * LINE_BYTES

    @property
    def set_header_bytes(self) -> int:
        """Bytes before the lines of a set."""
        return _round_up(SET_TAGS_AT + WORD_BYTES * self.ways, LINE_BYTES)

    @property
    def set_bytes(self) -> int:
        """Bytes from one set to the next."""
        return self.set_header_bytes + self.ways * LINE_BYTES


@dataclass(frozen=True, slots=True)
class ArrivalLaw:
    """When a posted write-back lands: log-uniformly between ``shortest`` and ``longest``.

    In operations of the node, or in ns; ``held`` write-backs land only when something drains them.
    """

    unit: ArrivalUnit = "operations"
    shortest: int = 0
    longest: int = 256

    def __post_init__(self) -> None:
        if self.unit not in ARRIVAL_UNITS:
            raise PodLayoutError(f"the unit is one of {ARRIVAL_UNITS}, got {self.unit!r}")
        if not 0 <= self.shortest <= self.longest < 1 << 40:
            raise PodLayoutError(
                f"need 0 <= shortest <= longest < 2**40, got {self.shortest} and {self.longest}"
            )


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What a node's cache does of its own accord, in events per million operations of a process.

    ``evictions`` drop a line, written back if dirty; ``fills`` bring one in. Half of them strike
    near the line that was last used.
    """

    evictions_per_million: int = 0
    fills_per_million: int = 0

    def __post_init__(self) -> None:
        for name, value in zip(("evictions", "fills"), astuple(self), strict=True):
            if not 0 <= value <= 1_000_000:
                raise PodLayoutError(f"{name}: 0 to 1,000,000 per million, got {value}")


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What the shared device charges in wall time. All zero: it costs what the emulator costs.

    ``fill_ns`` for a line that is not in the cache and for a DMA beside its lines, ``flush_ns`` for
    a ``clflush``, and ``line_ps`` of the one pipe that all nodes share, for every line that moves
    (64 B at 10.1 GB/s: 6337 ps). What is posted occupies the pipe and is waited for by nobody.
    """

    fill_ns: int = 0
    flush_ns: int = 0
    line_ps: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value < 1 << 40:
                raise PodLayoutError(f"{item.name} must be in [0, 2**40), got {value}")


@dataclass(frozen=True, slots=True)
class PodShape:
    """A pod: how many nodes, processes and bytes, and how its caches and device behave.

    ``fence_arrives``: whether ``sfence`` and ``mfence`` wait until the node's posted write-backs
    have landed (TraCT found that they do not). ``local_words`` and ``local_locks`` are what each
    node has of its own DRAM. Only emulated pods use ``fence_arrives``, ``cache``, ``arrival``
    and ``disturbance``, and native ones have no ``costs``.
    """

    region_bytes: int
    nodes: int = 2
    processes: int = 1
    mode: Mode = "emulated"
    seed: int = 0
    local_words: int = 4096
    local_locks: int = 64
    fence_arrives: bool = False
    cache: CacheGeometry = field(default_factory=CacheGeometry)
    arrival: ArrivalLaw = field(default_factory=ArrivalLaw)
    disturbance: Disturbance = field(default_factory=Disturbance)
    costs: DeviceCosts = field(default_factory=DeviceCosts)

    _LIMITS: ClassVar = (
        ("nodes", 1, MAX_NODES),
        ("processes", 1, MAX_PROCESSES),
        ("seed", 0, (1 << 62) - 1),
        ("local_words", 0, 1 << 28),
        ("local_locks", 0, 1 << 20),
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PodLayoutError(f"the mode is one of {MODES}, got {self.mode!r}")
        if self.region_bytes <= 0 or self.region_bytes % LINE_BYTES:
            raise PodLayoutError(
                f"a region is a positive number of {LINE_BYTES} B lines, got {self.region_bytes} B"
            )
        for name, least, most in self._LIMITS:
            value = getattr(self, name)
            if not least <= value <= most:
                raise PodLayoutError(f"{name} must be in [{least}, {most}], got {value}")

    # Where things are

    @property
    def slots(self) -> int:
        """Process slots of a node: its processes, and one for the host."""
        return self.processes + 1

    @property
    def table_entries(self) -> int:
        """Entries of the process table: all processes, and the host's last."""
        return self.nodes * self.processes + 1

    def token(self, node: int, process: int) -> int:
        """Return what stands in a lock that this process holds; the host is process -1."""
        return self.table_entries if process < 0 else node * self.processes + process + 1

    @property
    def control_bytes(self) -> int:
        """Size of the control mapping."""
        return _round_up(PROCESSES_AT + self.table_entries * PROCESS_BYTES, PAGE_BYTES)

    @property
    def local_locks_at(self) -> int:
        """Where a node mapping's local locks begin, a line each."""
        return SLOTS_AT + self.slots * SLOT_BYTES

    @property
    def local_words_at(self) -> int:
        """Where a node mapping's local words begin."""
        return self.local_locks_at + self.local_locks * LINE_BYTES

    @property
    def queue_at(self) -> int:
        """Where a node mapping's posted write-backs begin."""
        return _round_up(self.local_words_at + self.local_words * WORD_BYTES, LINE_BYTES)

    @property
    def cache_at(self) -> int:
        """Where a node mapping's sets begin."""
        return self.queue_at + self.cache.posted * POSTED_BYTES

    @property
    def node_bytes(self) -> int:
        """Size of a node mapping."""
        end = self.cache_at + self.cache.sets * self.cache.set_bytes
        return _round_up(end if self.mode == "emulated" else self.queue_at, PAGE_BYTES)

    # The header of the control mapping

    def header(self) -> bytes:
        """Return the header: magic, version, checksum of the rest, and every value."""
        body = struct.pack(
            f"<{HEADER_WORDS}q",
            *_padded(
                [
                    self.region_bytes,
                    self.nodes,
                    self.processes,
                    MODES.index(self.mode),
                    self.seed,
                    self.local_words,
                    self.local_locks,
                    int(self.fence_arrives),
                    *astuple(self.cache),
                    ARRIVAL_UNITS.index(self.arrival.unit),
                    self.arrival.shortest,
                    self.arrival.longest,
                    *astuple(self.disturbance),
                    *astuple(self.costs),
                ]
            ),
        )
        return struct.pack("<qqq", CONTROL_MAGIC, VERSION, _checksum(body)) + body

    @classmethod
    def from_header(cls, header: bytes) -> Self:
        """Return the shape that a header describes, or refuse it."""
        if len(header) < 24 + 8 * HEADER_WORDS:
            raise PodLayoutError("not a pod: the control file is shorter than its header")
        magic, version, checksum = struct.unpack_from("<qqq", header)
        if magic != CONTROL_MAGIC:
            raise PodLayoutError("not a pod: the control file does not begin with a pod's header")
        if version != VERSION:
            raise PodLayoutError(f"a pod of version {version}; this program knows {VERSION}")
        body = header[24 : 24 + 8 * HEADER_WORDS]
        if checksum != _checksum(body):
            raise PodLayoutError("the pod's header is corrupt: its checksum does not match")
        words = struct.unpack(f"<{HEADER_WORDS}q", body)
        return cls(
            region_bytes=words[0],
            nodes=words[1],
            processes=words[2],
            mode=MODES[words[3]],
            seed=words[4],
            local_words=words[5],
            local_locks=words[6],
            fence_arrives=bool(words[7]),
            cache=CacheGeometry(*words[8:11]),
            arrival=ArrivalLaw(ARRIVAL_UNITS[words[11]], *words[12:14]),
            disturbance=Disturbance(*words[14:16]),
            costs=DeviceCosts(*words[16:19]),
        )

    def settings(self) -> bytes:
        """Return the words that operations read, as they lie from ``SETTINGS_AT``."""
        return struct.pack(
            "<9q",
            *astuple(self.costs),
            int(self.fence_arrives),
            ARRIVAL_UNITS.index(self.arrival.unit),
            self.arrival.shortest,
            self.arrival.longest,
            *astuple(self.disturbance),
        )


def _padded(words: list[int]) -> list[int]:
    return words + [0] * (HEADER_WORDS - len(words))


def _checksum(body: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(body, digest_size=7).digest(), "little")


def _round_up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain
