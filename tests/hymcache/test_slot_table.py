"""Master's slot table against a dictionary and a list, at its limits, and its mutants."""

from __future__ import annotations

import hashlib
import itertools
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cxlbench.harness.bench_master import bench_master
from cxlbench.hymcache import slot_kernels, slot_table
from cxlbench.hymcache.slot_table import (
    SLOT_DTYPE,
    InsertResult,
    SlotState,
    SlotTable,
    TableCorruptError,
    TableFullError,
    UpdateResult,
    pack_keys,
)

WRITING, READY, EVICTING = SlotState.WRITING, SlotState.READY, SlotState.EVICTING
FIELDS = ("node", "device", "address", "length", "generation")
LAST_GENERATION = 2**32 - 1


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


# Keys that share all but one word with another key, besides ordinary ones.
POOL = [key(n) for n in range(12)]
POOL += [POOL[0][:24] + bytes(8), bytes(8) + POOL[1][8:], POOL[2][:8] + bytes(8) + POOL[2][16:]]
MACHINE_OBJECTS = 9


def filled(numbers, *, max_objects=100, state=READY) -> SlotTable:
    table = SlotTable(max_objects)
    for number in numbers:
        table.insert([key(number)], **location(number), state=state)
    return table


def location(number: int) -> dict[str, int]:
    return {
        "node": number % 7,
        "device": number % 3,
        "address": number << 24,
        "length": 16 << 20,
        "generation": number,
    }


def numbers_in(table: SlotTable, *, state=None, among=1000) -> list[int]:
    """Return the numbers of the table's keys, oldest first."""
    names = {key(n): n for n in range(among)}
    return [names[k] for k in table.oldest_first(state=state)]


generations = st.sampled_from([0, 1, 2**31, LAST_GENERATION - 1, LAST_GENERATION])
key_batches = st.lists(st.sampled_from(POOL), min_size=1, max_size=6)
states = st.sampled_from([WRITING, READY, EVICTING])
locations = st.tuples(
    st.sampled_from([0, 1, 2**16 - 1]),
    st.sampled_from([0, 1, 2**8 - 1]),
    st.sampled_from([0, 4096, 2**64 - 1]),
    st.sampled_from([1, 2**63, 2**64 - 1]),
    generations,
)


class TableMachine(RuleBasedStateMachine):
    """A table of 9 objects in 12 slots, so that every cluster is long and most wrap around."""

    def __init__(self):
        super().__init__()
        self.table = SlotTable(MACHINE_OBJECTS)
        self.model: dict[bytes, tuple[tuple[int, ...], SlotState]] = {}
        self.oldest_first: list[bytes] = []

    @rule(keys=key_batches, where=st.lists(locations, min_size=6, max_size=6), state=states)
    def insert(self, keys, where, state):
        columns = dict(
            zip(FIELDS, map(list, zip(*where[: len(keys)], strict=True)), strict=True),
        )
        new = list(dict.fromkeys(k for k in keys if k not in self.model))
        if len(self.model) + len(new) > MACHINE_OBJECTS:
            before = self.table.slots.copy()
            with pytest.raises(TableFullError):
                self.table.insert(keys, **columns, state=state)
            assert np.array_equal(before, self.table.slots)
            return
        batch = self.table.insert(keys, **columns, state=state)
        for at, (k, values) in enumerate(zip(keys, where, strict=False)):
            if k in self.model:
                assert batch.result[at] == InsertResult.EXISTS
                assert entry(batch.existing, at) == self.model[k]
            else:
                assert batch.result[at] == InsertResult.INSERTED
                assert batch.existing.state[at] == SlotState.EMPTY
                self.model[k] = (values, state)
        self.oldest_first += reversed(new)

    @rule(keys=key_batches, generation=st.none() | generations)
    def remove(self, keys, generation):
        gone = {
            k
            for k in keys
            if k in self.model and (generation is None or self.model[k][0][4] == generation)
        }
        assert self.table.remove(keys, generation=generation) == len(gone)
        for k in gone:
            del self.model[k]
        self.oldest_first = [k for k in self.oldest_first if k not in gone]

    @rule(keys=key_batches)
    def touch(self, keys):
        present = [k for k in keys if k in self.model]
        assert self.table.touch(keys) == len(present)
        for k in reversed(present):
            self.oldest_first.remove(k)
            self.oldest_first.append(k)

    @rule(keys=key_batches, expected=states, new=states, generation=st.none() | generations)
    def set_state(self, keys, expected, new, generation):
        results = self.table.set_state(keys, expected, new, generation=generation)
        for k, result in zip(keys, results, strict=True):
            if k not in self.model:
                assert result == UpdateResult.ABSENT
                continue
            values, state = self.model[k]
            fits = state == expected and generation in (None, values[4])
            assert result == (UpdateResult.CHANGED if fits else UpdateResult.UNCHANGED)
            if fits:
                self.model[k] = (values, new)

    @rule(keys=key_batches, where=locations)
    def update_location(self, keys, where):
        columns = dict(zip(FIELDS, where, strict=True))
        results = self.table.update_location(keys, **columns)
        for k, result in zip(keys, results, strict=True):
            assert result == (UpdateResult.CHANGED if k in self.model else UpdateResult.ABSENT)
            if k in self.model:
                self.model[k] = (where, self.model[k][1])

    @rule(n=st.integers(0, 12), state=st.none() | states)
    def coldest(self, n, state):
        expected = [k for k in self.oldest_first if state in (None, self.model[k][1])]
        assert self.table.coldest(n, state=state) == expected[:n]

    @invariant()
    def agrees_with_the_model(self):
        self.table.check()
        assert len(self.table) == len(self.model)
        assert list(self.table.oldest_first()) == self.oldest_first
        batch = self.table.lookup(POOL)
        slots = self.table.find(POOL)
        for at, k in enumerate(POOL):
            assert batch.found[at] == (slots[at] >= 0) == (k in self.model)
            if k in self.model:
                assert entry(batch, at) == self.model[k]
                assert self.table.slots["key"][slots[at]].tobytes() == k


def entry(batch, at):
    """Return position ``at`` of a lookup as the model has it."""
    values = tuple(int(getattr(batch, name)[at]) for name in FIELDS)
    return values, SlotState(batch.state[at])


TableMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestTableAgainstModel = TableMachine.TestCase


def interpreted_kernels(old: str = "", new: str = "") -> types.ModuleType:
    """Return the kernels as plain Python, with one place in their source changed."""
    source = Path(slot_kernels.__file__).read_text()
    compiled = "numba.njit(cache=True, nogil=True)(function)"
    assert source.count(compiled) == 1
    source = source.replace(compiled, "function")
    if old:
        assert source.count(old) == 1, f"the source has not one place like {old!r}"
        source = source.replace(old, new)
    module = types.ModuleType("interpreted_kernels")
    exec(compile(source, "interpreted_kernels", "exec"), module.__dict__)
    return module


def run_machine_on(kernels: types.ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(slot_table, "kernels", kernels)
    with np.errstate(over="ignore"):
        run_state_machine_as_test(
            TableMachine,
            settings=settings(
                max_examples=40,
                stateful_step_count=30,
                phases=[Phase.generate],
                database=None,
                print_blob=False,
            ),
        )


def test_the_interpreted_kernels_pass_as_the_compiled_ones_do(monkeypatch):
    run_machine_on(interpreted_kernels(), monkeypatch)


MUTANTS = {
    "a moved slot's older neighbour is not told": (
        "        _set_newer(table, header, _older(table, gap), gap)\n",
        "",
    ),
    "a moved slot's newer neighbour is not told": (
        "        _set_older(table, header, _newer(table, gap), gap)\n",
        "",
    ),
    "the shift wraps to the second slot": (
        "at = at + 1 if at + 1 < slots else 0",
        "at = at + 1 if at + 1 < slots else 1",
    ),
    "the shift stops at the end of the table": (
        "        at = at + 1 if at + 1 < slots else 0\n",
        "        at = at + 1\n        if at == slots:\n            break\n",
    ),
    "the shift's distance wraps one short": (
        "            distance_from_home += slots\n",
        "            distance_from_home += slots - 1\n",
    ),
    "the shift leaves a key whose home is the gap": (
        "if distance_from_home < distance_from_gap",
        "if distance_from_home <= distance_from_gap",
    ),
    "the shift moves a key before its home": (
        "if distance_from_home < distance_from_gap",
        "if distance_from_home < 0",
    ),
    "a removed slot stays in the list": (
        "    _unlink(table, header, slot)\n    header",
        "    header",
    ),
    "a search compares three words": (
        "            and table[at, 3] == keys[row, 3]\n",
        "",
    ),
    "a touch makes the tail newest": (
        "for i in range(keys.shape[0] - 1, -1, -1):",
        "for i in range(keys.shape[0]):",
    ),
    "an insertion makes the tail newest": ("        newer = slot\n    return", "    return"),
    "a batch that does not fit stays in part": ("if new[j]:", "if False:"),
    "the limit is one too high": ("if header[COUNT] >= limit", "if header[COUNT] > limit"),
    "set_state ignores the expected state": (
        "if np.int64(word >> _S56) != expected:",
        "if False:",
    ),
    "set_state ignores the generation": (
        "if generations[i] != ANY and np.int64(word & _LOW32) != generations[i]:",
        "if False:",
    ),
    "remove ignores the generation": (
        "if generations[i] != ANY and np.int64(table[slot, 6] & _LOW32) != generations[i]:",
        "if False:",
    ),
    "a new location overwrites the state": (
        "(table[slot, 6] & ~_STATE_MASK) | (rows[i, 6] & _STATE_MASK)",
        "rows[i, 6]",
    ),
}


def test_kernels_compile_where_no_folder_can_hold_their_code():
    module: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", module)
    assert slot_kernels._kernel(module["double"])(21) == 42


@pytest.mark.parametrize("name", MUTANTS)
def test_the_state_machine_notices_when(name, monkeypatch):
    kernels = interpreted_kernels(*MUTANTS[name])
    with pytest.raises((AssertionError, IndexError, pytest.fail.Exception)):
        run_machine_on(kernels, monkeypatch)


def keys_at_home(home: int, count: int, *, max_objects: int) -> list[bytes]:
    """Return keys whose search starts at one slot of a table for ``max_objects``."""
    found = []
    for number in itertools.count():
        table = SlotTable(max_objects)
        table.insert([key(number)], **location(number))
        if table.find([key(number)])[0] == home % table.n_slots:
            found.append(key(number))
            if len(found) == count:
                return found
    raise AssertionError


def test_a_cluster_across_the_end_survives_removal_in_every_order():
    last = keys_at_home(-1, 2, max_objects=8)
    cluster = [
        *keys_at_home(-2, 1, max_objects=8),
        *last,
        *keys_at_home(0, 1, max_objects=8),
        *keys_at_home(1, 1, max_objects=8),
    ]
    for order in itertools.permutations(cluster):
        table = SlotTable(8)
        table.insert(cluster, **location(3))
        slots = table.find(cluster).tolist()
        assert min(slots) == 0
        assert max(slots) == table.n_slots - 1
        left = list(cluster)
        for k in order:
            assert table.remove([k]) == 1
            left.remove(k)
            table.check()
            assert list(table.oldest_first()) == left[::-1]
            assert (table.find(left) >= 0).all()
        assert not table.slots.view(np.uint8).any()


def test_a_slot_has_64_bytes_and_the_papers_table_52_mb():
    assert SLOT_DTYPE.itemsize == 64
    table = SlotTable(650_000)
    assert table.n_slots == 812_500
    assert table.nbytes == 52_000_000
    assert table.slots.ctypes.data % 64 == 0


@pytest.mark.parametrize("objects", [1, 2, 3, 4, 5, 1000])
def test_a_full_table_has_a_load_of_at_most_four_fifths(objects):
    table = filled(range(objects), max_objects=objects)
    assert len(table) == objects
    assert table.load <= 0.8
    assert table.n_slots == int(np.ceil(objects / 0.8))
    table.check()
    with pytest.raises(TableFullError, match=f"room for {objects} objects"):
        table.insert([key(objects)], **location(0))


def test_a_batch_that_does_not_fit_changes_not_one_byte():
    table = filled(range(8), max_objects=10)
    before, order = table.slots.copy(), numbers_in(table)
    with pytest.raises(TableFullError, match="key 4 of a batch of 5"):
        table.insert([key(n) for n in (8, 3, 9, 8, 10)], **location(0))
    assert np.array_equal(table.slots, before)
    assert numbers_in(table) == order
    table.check()
    assert table.insert([key(n) for n in (8, 3, 9, 8)], **location(0)).result.sum() == 2


def test_every_field_comes_back_at_its_largest():
    table = SlotTable(4)
    largest = {
        "node": 2**16 - 1,
        "device": 2**8 - 1,
        "address": 2**64 - 1,
        "length": 2**64 - 1,
        "generation": LAST_GENERATION,
    }
    table.insert([key(1)], **largest, state=EVICTING)
    batch = table.lookup([key(0), key(1)])
    assert len(batch) == 2
    assert batch.found.tolist() == [False, True]
    assert entry(batch, 1) == (tuple(largest.values()), EVICTING)
    assert not batch.words[0].any()


def test_a_lookup_is_a_copy():
    table = filled([1])
    batch = table.lookup([key(1)])
    table.remove([key(1)])
    assert batch.state.tolist() == [READY]


def test_values_may_differ_by_key_or_be_one_for_all():
    table = SlotTable(8)
    keys = [key(n) for n in range(3)]
    table.insert(
        keys, node=[1, 2, 3], device=0, address=np.arange(3) * 4096, length=7, generation=(5, 6, 7)
    )
    batch = table.lookup(keys)
    assert batch.node.tolist() == [1, 2, 3]
    assert batch.address.tolist() == [0, 4096, 8192]
    assert batch.length.tolist() == [7, 7, 7]
    assert batch.generation.tolist() == [5, 6, 7]
    assert batch.state.tolist() == [WRITING] * 3


def test_after_a_touch_the_head_is_newest_and_the_tail_goes_first():
    table = filled(range(6))
    table.touch([key(n) for n in (1, 2, 3)])
    assert numbers_in(table) == [0, 4, 5, 3, 2, 1]
    assert table.coldest(4) == [key(n) for n in (0, 4, 5, 3)]


def test_a_new_chain_enters_with_its_head_newest():
    table = filled([7])
    table.insert([key(n) for n in (1, 2, 3)], **location(0))
    assert numbers_in(table) == [7, 3, 2, 1]


def test_an_existing_key_keeps_its_age_and_place_when_inserted_again():
    table = filled([1, 2])
    batch = table.insert([key(1), key(3)], **location(99), state=WRITING)
    assert batch.result.tolist() == [InsertResult.EXISTS, InsertResult.INSERTED]
    assert batch.existing.address.tolist() == [1 << 24, 0]
    assert numbers_in(table) == [1, 2, 3]
    assert entry(table.lookup([key(1)]), 0) == (tuple(location(1).values()), READY)


def test_the_coldest_are_chosen_by_state_and_all_states_have_an_age():
    table = filled(range(6))
    table.set_state([key(0), key(3)], READY, EVICTING)
    table.set_state([key(1)], READY, WRITING)
    assert numbers_in(table) == [0, 1, 2, 3, 4, 5]
    assert table.coldest(2) == [key(2), key(4)]
    assert table.coldest(9, state=EVICTING) == [key(0), key(3)]
    assert table.coldest(9, state=WRITING) == [key(1)]
    assert table.coldest(3, state=None) == [key(0), key(1), key(2)]
    assert table.coldest(0) == []


def test_an_older_generation_changes_nothing():
    table = filled([5])
    assert table.set_state([key(5)], READY, EVICTING, generation=4) == UpdateResult.UNCHANGED
    assert table.remove([key(5)], generation=4) == 0
    assert table.set_state([key(5)], READY, EVICTING, generation=[5]) == UpdateResult.CHANGED
    assert table.remove([key(5)], generation=5) == 1
    assert len(table) == 0


def test_iteration_shows_the_table_as_it_was():
    table = filled(range(5))
    seen = []
    for k in table.oldest_first():
        table.remove([k])
        seen.append(k)
    assert seen == [key(n) for n in range(5)]
    assert len(table) == 0


def test_keys_may_come_as_list_joined_or_array_of_any_alignment():
    table = filled(range(4))
    keys = [key(n) for n in (3, 0, 9)]
    expected = table.find(keys).tolist()
    packed = pack_keys(keys)
    shifted = np.zeros(3 * 32 + 1, np.uint8)
    shifted[1:] = packed.reshape(-1)
    wide = np.zeros((3, 40), np.uint8)
    wide[:, 3:35] = packed
    for form in (tuple(keys), b"".join(keys), packed, packed.copy(), wide[:, 3:35]):
        assert table.find(form).tolist() == expected
    assert table.find(shifted[1:].reshape(3, 32)).tolist() == expected
    assert packed.copy().flags.writeable


def test_the_callers_array_of_keys_stays_writable():
    keys = pack_keys([key(1)]).copy()
    filled([1]).find(keys)
    keys[0, 0] ^= 1
    assert keys.flags.writeable


@pytest.mark.parametrize("nothing", [[], (), b"", np.empty((0, 32), np.uint8)])
def test_an_empty_batch_is_answered_with_nothing(nothing):
    table = filled([1])
    assert len(table.lookup(nothing)) == 0
    assert table.lookup(nothing).state.tolist() == []
    assert table.find(nothing).tolist() == []
    assert table.insert(nothing, **location(0)).result.tolist() == []
    assert table.set_state(nothing, READY, WRITING).tolist() == []
    assert table.remove(nothing) == table.touch(nothing) == 0
    assert numbers_in(table) == [1]


@pytest.mark.parametrize(
    "keys",
    [
        [b"short"],
        [bytes(31), bytes(33)],
        bytes(33),
        np.zeros(32, np.uint8),
        np.zeros((2, 31), np.uint8),
        np.zeros((2, 32), np.int8),
    ],
)
def test_keys_of_another_size_are_refused(keys):
    with pytest.raises(ValueError, match="key"):
        filled([1]).lookup(keys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node", 2**16),
        ("device", [0, 256]),
        ("address", -1),
        ("length", 1.5),
        ("generation", 2**32),
        ("generation", np.array([0, -1])),
        ("node", [1, 2, 3]),
        ("address", 2**64),
        ("address", [0, 2**64]),
        ("length", [-1, 2**63]),
        ("length", [0.5, 2**63]),
        ("length", "7"),
        ("node", None),
        ("device", np.array([0.5, 1.0])),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_changes(field, value):
    table = SlotTable(8)
    with pytest.raises(ValueError, match=field):
        table.insert([key(0), key(1)], **{**location(0), field: value})
    assert len(table) == 0


def test_empty_is_no_state_to_set():
    table = filled([1])
    with pytest.raises(ValueError, match="remove"):
        table.insert([key(2)], **location(0), state=SlotState.EMPTY)
    with pytest.raises(ValueError, match="remove"):
        table.set_state([key(1)], READY, SlotState.EMPTY)
    with pytest.raises(ValueError, match="remove"):
        table.coldest(1, state=SlotState.EMPTY)


@pytest.mark.parametrize("objects", [0, -5, 2**32])
def test_a_table_of_impossible_size_is_refused(objects):
    with pytest.raises(ValueError, match="objects"):
        SlotTable(objects)


def test_the_view_of_all_slots_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        filled([1]).slots["node"] = 3


@pytest.mark.parametrize("same", [slice(0, 24), slice(8, 32), slice(0, 8), slice(4, 32)])
def test_keys_that_share_a_prefix_or_suffix_do_not_cluster(same):
    keys = np.zeros((8000, 32), np.uint8)
    free = [at for at in range(32) if at not in range(32)[same]][:4]
    keys[:, free] = np.arange(8000, dtype="<u4").view(np.uint8).reshape(-1, 4)[:, : len(free)]
    table = SlotTable(8000)
    table.insert(keys, **location(0))
    assert table.probe_lengths().mean < 4.0


DAMAGE = {
    "not all zero": lambda t: t._table.__setitem__((t.find([key(1)])[0], 6), 0),
    "cannot be reached": lambda t: t._table.__setitem__((t.find([key(1)])[0], 0), 1),
    "number of objects": lambda t: t._header.__setitem__(0, 4),
    "does not lead to a full slot": lambda t: t._header.__setitem__(1, t.n_slots),
    "neighbours": lambda t: t._table.__setitem__(
        (t.find([key(1)])[0], 7), t._table[t.find([key(2)])[0], 7]
    ),
    "does not hold all": lambda t: t._header.__setitem__(2, 0),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_check_names_the_damage(message):
    table = filled(range(5))
    table.check()
    DAMAGE[message](table)
    with pytest.raises(TableCorruptError, match=message):
        table.check()


def test_check_finds_a_key_that_is_there_twice():
    table = SlotTable(8)
    first, second = keys_at_home(4, 2, max_objects=8)
    table.insert([first, second], **location(0))
    table._table[5, :4] = table._table[4, :4]
    with pytest.raises(TableCorruptError, match="twice"):
        table.check()


def test_a_full_table_of_the_papers_size_answers_a_million_keys_a_second():
    bench = bench_master(objects=650_000, batches=1_000, seed=1)
    assert bench.bytes_per_slot == 64
    assert bench.load == pytest.approx(0.8)
    assert bench.probe_length_mean == pytest.approx(3.0, abs=0.1)
    assert bench.hit_keys_per_s >= 1e6
    assert bench.miss_keys_per_s >= 1e6


@pytest.mark.parametrize("wrong", [{"objects": 31}, {"batches": 0}])
def test_a_bench_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 32 objects and 1 batch"):
        bench_master(**wrong)
