"""TARGET of the pod's commands: a scenario named ``module:function``.

Whatever goes wrong before the first step of a schedule is the scenario's fault and says so; what
goes wrong in its tasks is what the explorer looks for.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable

from cxlbench.emu.pod_failure import PodUsageError
from cxlbench.emu.pod_scenario import Pod
from cxlbench.emu.user_objects import UserObjectError, load_callable

Scenario = Callable[[Pod], object]


class ScenarioError(ValueError):
    """A scenario could not be imported, or raised while it was built."""


def load_scenario(target: str) -> Scenario:
    """Return the scenario that ``module:function`` names; what it raises becomes an error of its.

    Raises:
        UserObjectError: there is no such module or function.
        ScenarioError: the module raised when it was imported, or what it names does not take one
            argument.
    """
    try:
        scenario = load_callable(target, what="scenario")
    except UserObjectError:
        raise
    except Exception as error:  # whatever a user's module raises
        raise ScenarioError(f"importing scenario {target!r} raised {_told(error)}") from error
    return guarded(scenario, target)


def guarded(scenario: Scenario, name: str) -> Scenario:
    """Return ``scenario`` such that what it raises while it is built is a ``ScenarioError``."""
    _check_arguments(scenario, name)

    @functools.wraps(scenario)
    def build(pod: Pod) -> None:
        try:
            scenario(pod)
        except PodUsageError as error:
            raise ScenarioError(f"scenario {name!r}: {error}") from error
        except Exception as error:  # whatever a user's function raises
            raise ScenarioError(f"building scenario {name!r} raised {_told(error)}") from error

    return build


def _check_arguments(scenario: Scenario, name: str) -> None:
    try:
        signature = inspect.signature(scenario)
    except (TypeError, ValueError):  # of some callables nobody can say what they take
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ScenarioError(
            f"scenario {name!r}: a scenario takes one argument, the pod, and starts tasks by "
            f"pod.run(node, function); this one is called as {signature}"
        ) from None


def _told(error: Exception) -> str:
    """Say what was raised, and the line at which."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return told
    frames = traceback.extract_tb(error.__traceback__)
    return f"{told} ({frames[-1].filename}:{frames[-1].lineno})" if frames else told
