"""The errors of TraCT's host-side classes: what was asked, what is possible, what to do."""

from __future__ import annotations


class TractError(Exception):
    """Something that TraCT refuses; nothing was changed in the region."""


class LayoutError(TractError, ValueError):
    """Sizes that no region can have."""


class RegionTooSmallError(TractError):
    """The region has fewer bytes than the sizes need, or than its header says."""


class RegionInUseError(TractError):
    """The region holds a pod already, and formatting was not told to overwrite it."""


class ForeignRegionError(TractError):
    """The region does not begin with TraCT's header: something else, or nothing, lives there."""


class OtherVersionError(TractError):
    """The region was formatted by a version of TraCT with another layout."""


class CorruptedHeaderError(TractError):
    """The header's checksum does not fit its words."""


class NoSuchNodeError(TractError):
    """A node number that has no slots in the region."""


class NoSuchLockError(TractError):
    """A lock number that the region does not have, or that belongs to TraCT itself."""


class KeyLengthError(TractError, ValueError):
    """A block key that is not 32 bytes long."""


class RootNameError(TractError, ValueError):
    """A root's name that is empty, too long, or has a NUL in it."""


class ObjectTooLargeError(TractError):
    """An object that no chunk (a block) or no run of chunks (a named object) can hold."""


class OutOfSpaceError(TractError):
    """No free chunks for an object, or no free root for its name."""


class NameExistsError(TractError):
    """``put`` of a name that has an object."""


class NameNotFoundError(TractError, LookupError):
    """``get`` or ``delete`` of a name that has no object."""
