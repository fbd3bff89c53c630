"""The control messages of HyMCache between processes, and the version that they have.

Three sets: what clients send to Master, what clients send to a node, and what Master sends to a
node. Answers are of the type that the request names. Any change of a field is a new ``VERSION``: a
peer of another one is told so and not listened to. How they travel is in ``emu/wire.py``.

Numbers have ranges, keys a length: what is outside is no message. Units: bytes, s of the machine's
shared clock.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from cxlbench.emu.fabric_shared import ArenaInfo, Done, GiveUp, PostRead, PostWrite
from cxlbench.emu.wire import MessageSet
from cxlbench.kv.identity import KEY_BYTES
from cxlbench.kv.results import KeyResult

VERSION = 2

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
"""Of a node, or of a device on it."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 50)]
Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Generation: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Instant: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

Name: TypeAlias = tuple[int, int]
Place: TypeAlias = tuple[Number, Number, Address, Size, Generation]
"""node, device, address, size, generation"""


class _Message(msgspec.Struct, array_like=True, tag=lambda name: name.lower()):
    """A body: an array, told apart by its first element."""


# -- to Master ----------------------------------------------------------------------------------


class Lookup(_Message):
    """Answered by ``LookupAnswer``."""

    reader: Name
    keys: list[Key]
    used: list[Key]


class LookupAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A place or None per key, and until when the places are good."""

    places: list[Place | None]
    until_s: float


class Allocate(_Message):
    """Answered by ``AllocateAnswer``."""

    ticket: Name
    keys: list[Key]
    size_bytes: Size
    near: tuple[Number, Number] | None
    after: Key | None


class AllocateAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The node to write to, and for each key None (write it) or why not."""

    node: int
    device: int | None
    refusals: list[KeyResult | None]


class Register(_Message):
    """Answered by a ``KeyResult`` per block."""

    ticket: Name
    keys: list[Key]
    places: list[Place]
    chain: list[Key]


class AbortTicket(_Message):
    """Give up what is WRITING under a ticket."""

    ticket: Name


class Release(_Message):
    """End a lease."""

    reader: Name


class Touch(_Message):
    """A chain is in use."""

    chain: list[Key]


class Gone(_Message):
    """An object is not there any more, or is not what it must be."""

    node: Number
    key: Key
    generation: Generation


class Announce(_Message):
    """A node is there, and serves at ``endpoint``. Answered by whether it may: True, or why not."""

    node: Number
    endpoint: str
    epoch: int
    device_count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    max_objects: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


class Directory(_Message):
    """Answered by ``NodeEntry`` for each node that is up."""


class NodeEntry(msgspec.Struct, array_like=True, frozen=True):
    """Where a node serves."""

    node: int
    endpoint: str
    epoch: int


class AskStatus(_Message):
    """Answered by a mapping of figures; of Master or of a node."""


ToMaster: TypeAlias = (
    Lookup
    | Allocate
    | Register
    | AbortTicket
    | Release
    | Touch
    | Gone
    | Announce
    | Directory
    | AskStatus
)
TO_MASTER: MessageSet[ToMaster] = MessageSet(VERSION, ToMaster)

# -- to a node ----------------------------------------------------------------------------------


class OpenNode(_Message):
    """Answered by ``NodeMemory``: what a client must map to read and write."""


class NodeMemory(msgspec.Struct, array_like=True, frozen=True):
    """A node's arenas, its table of grants, and its number."""

    node: int
    epoch: int
    arenas: list[ArenaInfo]
    table: ArenaInfo


class OpenStream(_Message):
    """Answered by ``StreamAnswer``."""

    name: Name
    onto: Name | None
    request_id: int
    keys: list[Key]
    until_s: Instant


class StreamAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Which candidates are here, and per device the rkey and whether it stages."""

    start: int
    objects: int
    rkeys: list[int]
    staged: list[bool]


class Token(_Message):
    """Answered when the object may be read, by a status."""

    name: Name
    position: Count


class Consumed(_Message):
    """A read token comes back."""

    name: Name
    position: Count


class CloseStream(_Message):
    """A stream comes back."""

    name: Name


class Reserve(_Message):
    """Answered by a ``GrantAnswer`` or a ``KeyResult`` per key."""

    name: Name
    keys: list[Key]
    size_bytes: Size
    device: Number | None


class GrantAnswer(msgspec.Struct, array_like=True, frozen=True):
    """Leave to write one object."""

    token: int
    rkey: int
    address: int
    generation: int
    device: int


class Commit(_Message):
    """Answered by a ``KeyResult`` per token."""

    tokens: list[int]


class AbortBatch(_Message):
    """Give back what a batch still holds."""

    name: Name


# -- from Master to a node ----------------------------------------------------------------------


class AskSpace(_Message):
    """Answered by a ``SpaceAnswer`` per device, for objects of this size."""

    size_bytes: Size


class SpaceAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A device's space, and what evicting whole segments would give."""

    capacity_bytes: int
    extent_bytes: int
    free_bytes: int
    dead_bytes: int
    victims: list[tuple[int, list[bytes]]]
    """Bytes that come free, and the keys to evict for them; cheapest first."""


class Publish(_Message):
    """Answered by whether each object is there, and can be found from now on."""

    keys: list[Key]
    addresses: list[Address]
    generations: list[Generation]


class Free(_Message):
    """Drop objects on which no lease is left."""

    keys: list[Key]
    generations: list[Generation]


class AskCatalog(_Message):
    """Answered by ``Catalog``: what can be found on the node, from generation ``first`` on.

    By generation, not by number: objects come and go between two parts.
    """

    first: Count


class Catalog(msgspec.Struct, array_like=True, frozen=True):
    """Objects in the order of their generations, whether there are more, and where they begin."""

    keys: list[Key]
    places: list[Place]
    more: bool
    next: int


ToNode: TypeAlias = (
    OpenNode
    | OpenStream
    | Token
    | Consumed
    | CloseStream
    | Reserve
    | Commit
    | AbortBatch
    | PostRead
    | PostWrite
    | Done
    | GiveUp
    | AskSpace
    | Publish
    | Free
    | AskCatalog
    | AskStatus
)
TO_NODE: MessageSet[ToNode] = MessageSet(VERSION, ToNode)
