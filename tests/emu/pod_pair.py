"""Two node caches on one device, for tests of the memory model: values instead of stores."""

from __future__ import annotations

import numpy as np

from cxlbench.emu.pod_model import BY_DMA, CACHED, Device, Dma, NodeCache, Store


class Seen:
    """An observer that remembers."""

    def __init__(self):
        self.landings = []
        self.fills = []

    def landed(self, node, line, old, new, origin, stores):
        self.landings.append((node, line, [stored.value for stored in stores], old is origin))

    def posted(self, node, back):
        pass

    def filled(self, node, line):
        self.fills.append((node, line))


def a_store(value, how=CACHED):
    return Store(value, 1, 1, (0, 1), how)


class Pair:
    """Two nodes on one device, with values instead of stores."""

    def __init__(self):
        self.seen = Seen()
        self.device = Device(self.seen)
        self.nodes = [NodeCache(0, self.device), NodeCache(1, self.device)]

    def load(self, node, word):
        return self.nodes[node].load(word).value

    def store(self, node, word, value):
        self.nodes[node].store(word, a_store(value))

    def held(self, word):
        return self.device.line(word >> 3)[word & 7].value


def a_write(cache, first_word, values):
    stores = [a_store(value, BY_DMA) for value in values]
    return Dma(1, cache, first_word, np.array(values), (0, 1), stores)


def a_read(cache, first_word, count):
    return Dma(1, cache, first_word, np.zeros(count, np.int64), (0, 1), None)
