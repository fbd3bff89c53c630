"""What processes of a live pod run to use the prefix cache through connectors."""

from __future__ import annotations

import numpy as np

from cxlbench.emu.clock import WallClock
from cxlbench.emu.pod_compile import prepare
from cxlbench.emu.pod_emulated import EmulatedMemory
from cxlbench.emu.pod_perform import prepare_for
from cxlbench.harness.content import BlockContent
from cxlbench.kv.identity import Namespace, trace_keys
from cxlbench.tract import chains, heap, prefix_cache, reserving
from cxlbench.tract.connector import TractConnector
from cxlbench.tract.layout import Sizes, plan
from cxlbench.tract.payload import compile_checksum
from cxlbench.tract.places import numbers_of, places_for
from cxlbench.tract.region import compiled_program, open_region
from cxlbench.tract.threaded import ThreadedNode
from tests.tract import live_programs

BLOCK_BYTES = 4096
KEYS = trace_keys(Namespace("m", "r", "bf16", "l", 128), range(40))


def warm_up():
    """Compile, or load from disk, what the processes run, before they are forked."""
    live_programs.warm_up()
    compile_checksum()
    layout = plan(Sizes(nodes=1, slots=1, chunks=1, chunk_bytes=64))
    memory = EmulatedMemory(*[0] * len(EmulatedMemory._fields))
    prepare_for(memory)
    keys, places = numbers_of(KEYS[:1]), places_for(1)
    words = np.zeros(8, np.int64)
    for program, *arguments in (
        (chains.look_up, keys, 0, places),
        (chains.read_block, 0, words),
        (chains.write_block, 0, words),
        (heap.slim,),
        (reserving.reserve_chain, keys, 64, places),
        (prefix_cache.publish_chain, places),
        (prefix_cache.unpin_chain, places, 0),
    ):
        prepare(compiled_program(program), memory, layout, *arguments)


async def exchange(live, connector, first, last):
    """Store the blocks from ``first`` to ``last``, wait for the word, read all that is there."""
    content = BlockContent(BLOCK_BYTES, phantom=False, seed=1)
    mine = KEYS[first:last]
    stored = connector.submit_store(1, mine, [content.make(key) for key in mine])
    live.send([result.name for result in (await stored.done.wait()).results])
    live.receive()
    found = (await connector.submit_lookup(2, KEYS, BLOCK_BYTES).done.wait()).leading_hits
    buffers = [content.empty() for _ in KEYS[:found]]
    loaded = await connector.submit_load(2, KEYS[:found], buffers).done.wait()
    connector.release(2)
    right = [content.holds(b, key) for b, key in zip(buffers, KEYS, strict=False)]
    await connector.close()
    return found, loaded.leading_hits, sum(right), connector.at_rest()


def worker(live, region_bytes, first, last):
    lay = open_region(live.memory, region_bytes)
    with WallClock() as clock:
        node = ThreadedNode(clock, live.memory)
        try:
            connector = TractConnector(clock, node, lay)
            return clock.run(exchange(live, connector, first, last))
        finally:
            node.close()
