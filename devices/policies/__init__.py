"""Replacement policies of transparent caches, one a file, replaceable by a user's own."""

from cxlbench.devices.policies.clock import ClockPolicy
from cxlbench.devices.policies.fifo import FifoPolicy
from cxlbench.devices.policies.loading import POLICY_NAMES, load_policy
from cxlbench.devices.policies.lru import LruPolicy
from cxlbench.devices.policies.protocol import PolicyError, PolicyFactory, ReplacementPolicy
from cxlbench.devices.policies.s3fifo import S3FifoPolicy

__all__ = [
    "POLICY_NAMES",
    "ClockPolicy",
    "FifoPolicy",
    "LruPolicy",
    "PolicyError",
    "PolicyFactory",
    "ReplacementPolicy",
    "S3FifoPolicy",
    "load_policy",
]
