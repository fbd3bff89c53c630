"""The memory model beside a naive one: plain words, copied about, nothing shared."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.emu.pod_pair import Pair, a_read, a_store, a_write

WORDS = 24  # of three lines
word_numbers = st.integers(0, WORDS - 1)
node_numbers = st.integers(0, 1)


class ModelMachine(RuleBasedStateMachine):
    """The model beside a naive one: copies of values, nothing shared, nothing clever."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()
        self.device = [0] * WORDS
        self.caches = [{}, {}]  # line -> list of 8 values
        self.dirty = [set(), set()]
        self.flying = [[], []]  # (line, {index: value}), oldest first
        self.count = 0

    def fresh(self, node, line):
        words = self.device[line * 8 : line * 8 + 8]
        for at, part in self.flying[node]:
            if at == line:
                for index, value in part.items():
                    words[index] = value
        return words

    def cached(self, node, line):
        if line not in self.caches[node]:
            self.caches[node][line] = self.fresh(node, line)
        return self.caches[node][line]

    def arrive(self, node, position):
        line, part = self.flying[node].pop(position)
        for index, value in part.items():
            self.device[line * 8 + index] = value

    def first(self, node, line):
        return next((i for i, (at, _) in enumerate(self.flying[node]) if at == line), None)

    def drain(self, node, line):
        while (first := self.first(node, line)) is not None:
            self.arrive(node, first)

    def write_back(self, node, line):
        if line in self.dirty[node]:
            self.dirty[node].remove(line)
            self.flying[node].append((line, dict(enumerate(self.caches[node][line]))))

    @rule(node=node_numbers, word=word_numbers)
    def load(self, node, word):
        assert self.pair.load(node, word) == self.cached(node, word // 8)[word % 8]

    @rule(node=node_numbers, word=word_numbers)
    def store(self, node, word):
        self.count += 1
        self.pair.store(node, word, self.count)
        self.cached(node, word // 8)[word % 8] = self.count
        self.dirty[node].add(word // 8)

    @rule(node=node_numbers, word=word_numbers)
    def ntstore(self, node, word):
        self.count += 1
        self.pair.nodes[node].ntstore(word, a_store(self.count))
        self.write_back(node, word // 8)
        self.caches[node].pop(word // 8, None)
        self.flying[node].append((word // 8, {word % 8: self.count}))

    @rule(node=node_numbers, line=st.integers(0, 2))
    def clflush(self, node, line):
        self.pair.nodes[node].clflush(line)
        self.write_back(node, line)
        self.drain(node, line)
        self.caches[node].pop(line, None)

    @rule(node=node_numbers, line=st.integers(0, 2), flush=st.sampled_from(["clflushopt", "evict"]))
    def drop(self, node, line, flush):
        getattr(self.pair.nodes[node], flush)(line)
        self.write_back(node, line)
        self.caches[node].pop(line, None)

    @rule(node=node_numbers, line=st.integers(0, 2))
    def clwb(self, node, line):
        self.pair.nodes[node].clwb(line)
        self.write_back(node, line)

    @rule(node=node_numbers, line=st.integers(0, 2))
    def fill(self, node, line):
        self.pair.nodes[node].fill(line)
        self.cached(node, line)

    @rule(node=node_numbers, line=st.integers(0, 2))
    def land(self, node, line):
        first = self.first(node, line)
        assert self.pair.nodes[node].land(line) is (first is not None)
        if first is not None:
            self.arrive(node, first)

    @rule(node=node_numbers, first=word_numbers, length=st.integers(1, 12))
    def dma_write(self, node, first, length):
        values = list(range(self.count + 1, self.count + 1 + min(length, WORDS - first)))
        self.count = values[-1]
        dma = a_write(self.pair.nodes[node], first, values)
        for piece in sorted(dma.left):
            dma.copy(piece)
        for line in range(first // 8, (first + len(values) - 1) // 8 + 1):
            self.write_back(node, line)
            self.drain(node, line)
            self.caches[node].pop(line, None)
        self.device[first : first + len(values)] = values

    @rule(node=node_numbers, first=word_numbers, length=st.integers(1, 12))
    def dma_read(self, node, first, length):
        length = min(length, WORDS - first)
        dma = a_read(self.pair.nodes[node], first, length)
        for piece in sorted(dma.left):
            dma.copy(piece)
        for word, got in enumerate(dma.got, first):
            line = self.caches[node].get(word // 8, self.fresh(node, word // 8))
            assert got.value == line[word % 8]

    @rule(node=node_numbers)
    def crash(self, node):
        self.pair.nodes[node].die(0)
        self.caches[node].clear()
        self.dirty[node].clear()
        self.flying[node].clear()

    @invariant()
    def the_device_is_the_same(self):
        assert [self.pair.held(word) for word in range(WORDS)] == self.device


TestModelAgainstPlainWords = ModelMachine.TestCase
TestModelAgainstPlainWords.settings = settings(max_examples=60, stateful_step_count=40)
