"""Same seed, same run, whatever the hash seed; another seed, another run."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import hashlib
from dataclasses import astuple
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.routing import Routing
from tests.harness.serve.setups import link, run

GIB = 1 << 30
how = Drive(order=Order.ROUNDS, concurrency=8)
for seed in (3, 4):
    work = generate(GeneratorKnobs(sessions=16, turns=4, first_input_tokens=900, think_s=0,
        first_input_stddev=200, turn_input_tokens=600, turn_input_stddev=100, seed=seed))
    for name, routing, options in (
        ("hymcache", Routing.ROUND_ROBIN, {}),
        ("mooncake", Routing.PREFIX, {"capacity_bytes": 4 * GIB}),
        ("lmcache-redis", Routing.PREFIX, {"local_bytes": 2 * GIB, "capacity_bytes": 4 * GIB}),
    ):
        result = run(work, name, how, options=options, seed=seed, prefill_servers=3,
                     decode_servers=1, handover=link(), routing=routing, gpu_blocks=150)
        rows = [astuple(one) for one in result.served]
        text = repr((rows, sorted(result.counters.items()), result.pipe_bytes, result.timers))
        print(name, hashlib.sha256(text.encode()).hexdigest())
"""


def rows(hash_seed: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout.splitlines()


def test_the_same_seed_gives_the_same_rows_whatever_the_hash_seed() -> None:
    first = rows("0")
    assert rows("12345") == first
    assert len(set(first)) == 6, "another seed gives other rows"
