"""From a name to a policy: the ones that come with the bench, or a user's ``module:object``."""

from __future__ import annotations

from difflib import get_close_matches

from cxlbench.devices.policies.checked import CheckedPolicy
from cxlbench.devices.policies.clock import ClockPolicy
from cxlbench.devices.policies.fifo import FifoPolicy
from cxlbench.devices.policies.lru import LruPolicy
from cxlbench.devices.policies.protocol import PolicyError, PolicyFactory, ReplacementPolicy
from cxlbench.devices.policies.s3fifo import S3FifoPolicy
from cxlbench.emu.user_objects import UserObjectError, load_callable

_OWN: dict[str, PolicyFactory] = {
    "lru": LruPolicy,
    "fifo": FifoPolicy,
    "clock": ClockPolicy,
    "s3fifo": S3FifoPolicy,
}

POLICY_NAMES: tuple[str, ...] = tuple(_OWN)


def load_policy(spec: str) -> PolicyFactory:
    """Return what makes the policy that ``spec`` names; call it with ``capacity_blocks``.

    Args:
        spec: one of ``POLICY_NAMES`` or ``module:object``, where the object is a class or function
            that takes ``capacity_blocks`` and returns a ``ReplacementPolicy``.

    Raises:
        PolicyError: no such name, module or object, or what it makes is no policy. A user's
            object is tried once with a capacity of 1, so that a run does not fail midway; what it
            makes is watched (``CheckedPolicy``).
    """
    if ":" in spec:
        return _from_module(spec)
    factory = _OWN.get(spec.lower())
    if factory is None:
        near = get_close_matches(spec.lower(), POLICY_NAMES, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise PolicyError(
            f"no replacement policy {spec!r}{hint} There are {', '.join(POLICY_NAMES)}, and your "
            "own as module:object"
        )
    return factory


def _from_module(spec: str) -> PolicyFactory:
    try:
        factory = load_callable(spec, what="policy")
    except UserObjectError as error:
        raise PolicyError(str(error)) from error
    object_name = spec.partition(":")[2]
    try:
        probe = factory(1)
    except Exception as error:
        raise PolicyError(
            f"policy {spec!r}: {object_name}(1) failed with {type(error).__name__}: {error}; "
            "it must take capacity_blocks"
        ) from error
    if not isinstance(probe, ReplacementPolicy):
        wanted = [name for name in _METHODS if not hasattr(probe, name)]
        raise PolicyError(f"policy {spec!r}: what it makes lacks {', '.join(wanted)}")
    return lambda capacity_blocks: CheckedPolicy(factory(capacity_blocks), spec)


_METHODS = (
    "capacity_blocks",
    "touch",
    "insert",
    "evict",
    "remove",
    "__len__",
    "__contains__",
)
