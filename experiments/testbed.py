"""The papers' testbeds and workloads, shared by their figures: what is stated, and what is not.

HyMCache §5: four prefill servers, one decode server, one storage server (4P-1D-1S); each prefill
server has one 100 Gb/s port for P→D and one for the tier, decode and storage server 200 Gb/s each;
A100 80 GB; blocks of 128 tokens; vLLM with its defaults. Single node: one worker on a tier of
200 Gb/s. TraCT §5: two servers with an A6000 each, 64 GB of a Niagara 2.0, a 100 Gb/s NIC.

LMSYS's conversations are not ours to ship; ``lmsys_like`` generates as many tokens a turn as the
data set has on average, of prompt and of answer (69.5 and 214.5: LMSYS-Chat-1M, table 1). When a
conversation is replayed, the answers in the history are the data set's, however many tokens are
decoded.

Units: tokens, bytes at full size, s.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CopyEngineProfile,
    LinkProfile,
    ServingEngineProfile,
)
from cxlbench.harness.experiment import Check, Context, Knob
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.requests import Workload
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.handover import LinkHandoverSpec, Path
from cxlbench.harness.serve.roofline import Roofline
from cxlbench.harness.serve.routing import Routing
from cxlbench.harness.serve.run import Simulated
from cxlbench.kv.geometry import model_shape

GIB = 1 << 30
MIB = 1 << 20

SERVING_PROFILES = ("a100-80g", "vllm-default", "gpu-copy-gen4x16", "nic-100g", "nic-200g")
"""What every figure of HyMCache's serving reads."""
NODE_PROFILES = ("a100-80g", "vllm-default", "gpu-copy-gen4x16", "nic-200g")
"""What those of one node read, which is joined to its tier by 200 Gb/s."""
HYMCACHE_PROFILES = ("cxl-hm-prototype", "pm1743-class", "software-default")
"""What its tier reads beside them."""
LMCACHE_PROFILES = ("lmcache-local",)
MOONCAKE_PROFILES = ("mooncake-store", "local-dram")

REDIS_PROFILES = ("lmcache-local", "redis-64g")

BLOCK_TOKENS = Knob(
    name="engine.block_tokens",
    value=128,
    unit="tokens",
    source="HyMCache §5: vLLM's block size is set to 128",
)
ROUTING = Knob(
    name="routing",
    value="round-robin",
    choices=("round-robin", "prefix-aware"),
    assumption=True,
    source="HyMCache does not say how requests are routed; both are run",
)

ORDER = Knob(
    name="workload.order",
    value="rounds",
    choices=("rounds", "sessions"),
    assumption=True,
    source="not stated; in rounds all conversations take their first turn, then their second, so "
    "that the footprint grows with the turns as the figures by turn have it",
)

COMPUTE = Knob(
    name="ablation.compute",
    value=1.0,
    unit="x",
    source="multiplies the accelerator's compute: what would be true if prefill were faster",
)
FASTER = 4
"""By how much prefill is faster in the ablations that ask what compute hides."""


def model_knob(name: str) -> Knob:
    """Return the knob of a model that the paper names."""
    return Knob(name="model", value=name, source="HyMCache §5")


def roofline(context: Context, *, gpu: str = "a100-80g") -> Roofline:
    """Return the model of the experiment on a GPU of its testbed."""
    accelerator = context.profile(AcceleratorProfile, gpu)
    compute = accelerator.peak_compute * context.number(COMPUTE.name)
    return Roofline(
        model_shape(context.choice("model")),
        replace(accelerator, peak_compute=compute),
        context.profile(ServingEngineProfile, "vllm-default"),
    )


def ablation(context: Context, **overrides: object) -> Context:
    """Return the experiment's quick form with other values of knobs (``__`` stands for a dot)."""
    texts = {name.replace("__", "."): str(value) for name, value in overrides.items()}
    return replace(context, quick=True, overrides={**context.overrides, **texts})


def pd_cluster(context: Context, routing: str, prefix_caching: bool = True) -> ClusterSpec:
    """Return HyMCache's 4P-1D cluster."""
    model = roofline(context)
    return ClusterSpec(
        roofline=model,
        block_tokens=context.count("engine.block_tokens"),
        prefill_servers=4,
        decode_servers=1,
        handover=LinkHandoverSpec(
            prefill_link=context.profile(LinkProfile, "nic-100g"),
            decode_link=context.profile(LinkProfile, "nic-200g"),
            copy_engine=context.profile(CopyEngineProfile, "gpu-copy-gen4x16"),
            path=Path.GPU_DIRECT,
            layers=model.shape.layers,
        ),
        routing=Routing(routing),
        prefix_caching=prefix_caching,
    )


def single_node(
    context: Context, prefix_caching: bool = True, *, gpu_blocks: int | None = None
) -> ClusterSpec:
    """Return HyMCache's single node."""
    return ClusterSpec(
        roofline=roofline(context),
        block_tokens=context.count("engine.block_tokens"),
        prefix_caching=prefix_caching,
        gpu_blocks=gpu_blocks,
    )


LMSYS_PROMPT = Knob(
    name="workload.prompt_tokens",
    value=69.5,
    unit="tokens",
    source="LMSYS-Chat-1M, table 1: mean tokens of a prompt",
    assumption=True,
)
LMSYS_ANSWER = Knob(
    name="workload.answer_tokens",
    value=214.5,
    unit="tokens",
    source="LMSYS-Chat-1M, table 1: mean tokens of an answer, which the next turn's history has",
    assumption=True,
)
LMSYS_SPREAD = Knob(
    name="workload.length_spread",
    value=0.5,
    source="no source; standard deviation of the lengths over their mean",
    assumption=True,
)


def lmsys_like(
    context: Context, *, sessions: int, turns: int, decoded: int, first_tokens: float | None = None
) -> Workload:
    """Return conversations with the data set's mean lengths, of which ``decoded`` tokens decode."""
    prompt, answer = context.number(LMSYS_PROMPT.name), context.number(LMSYS_ANSWER.name)
    spread = context.number(LMSYS_SPREAD.name)
    first = prompt if first_tokens is None else first_tokens
    workload = generate(
        GeneratorKnobs(
            sessions=sessions,
            turns=turns,
            shared_system_tokens=0,
            first_input_tokens=first,
            first_input_stddev=first * spread,
            turn_input_tokens=prompt,
            turn_input_stddev=prompt * spread,
            output_tokens=answer,
            output_stddev=answer * spread,
            think_s=0,
            block_tokens=context.count(BLOCK_TOKENS.name),
            seed=context.seed,
        ),
        name="lmsys-like",
    )
    return decoding(workload, decoded)


def decoding(workload: Workload, tokens: int) -> Workload:
    """Return the workload with answers cut to ``tokens``; the histories stay."""
    return dataclasses.replace(
        workload,
        requests=tuple(
            dataclasses.replace(r, output_tokens=min(r.output_tokens, tokens))
            for r in workload.requests
        ),
    )


def closed_loop(context: Context) -> Drive:
    """Return how conversations are offered at the experiment's concurrency."""
    return Drive(
        order=Order(context.choice(ORDER.name)),
        concurrency=context.count("workload.concurrency"),
    )


def checks_of(run: Simulated, what: str) -> list[Check]:
    """Return the laws of one run as checks."""
    return [Check(name=f"{what}: {law.name}", ok=law.ok, detail=law.detail) for law in run.laws]
