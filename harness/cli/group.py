"""The group of all commands: how errors, interrupts and exit codes reach the user.

An error of the user or of the host (a bad trace, a full disk) is one line on standard error and
exit code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click

import cxlbench as package

INTERRUPTED = 130
OUTPUT_CLOSED = 141
TERMINATED = 143
WRONG_DATA = 1
BAR_MISSED = 1
CHECK_FAILED = 1
BAD_INPUT = 2
TIMING_NOT_KEPT = 3

USER_ERRORS = (
    ("cxlbench.devices.policies", "PolicyError"),
    ("cxlbench.devices.profile_scale", "ScaleError"),
    ("cxlbench.devices.profile_schema", "ProfileError"),
    ("cxlbench.emu.faults", "FaultPlanError"),
    ("cxlbench.emu.status", "DeviceError"),
    ("cxlbench.emu.status", "HostLimitError"),
    ("cxlbench.harness.deployment", "DeploymentError"),
    ("cxlbench.harness.experiment", "ExperimentError"),
    ("cxlbench.harness.rig", "BlockTooLargeError"),
    ("cxlbench.harness.replay", "TraceHasNoIdsError"),
    ("cxlbench.harness.serve.gpu_pool", "PromptTooLongError"),
    ("cxlbench.harness.serve.roofline", "ModelDoesNotFitError"),
    ("cxlbench.harness.tiers.catalog", "UnknownTierError"),
    ("cxlbench.harness.tiers.options", "TierOptionError"),
    ("cxlbench.harness.requests", "WorkloadError"),
    ("cxlbench.harness.serve.roofline", "ModelDoesNotFitError"),
    ("cxlbench.harness.traces.lines", "TraceError"),
    ("cxlbench.emu.user_objects", "UserObjectError"),
    ("cxlbench.kv.geometry", "GeometryError"),
)
"""Errors that say what the user can do, by module: a module not loaded has raised none."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, which end a run as Ctrl-C does: its files are removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``Terminated`` meanwhile, where this thread may say so."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup stays what it is
                before[number] = signal.signal(number, end)
    except ValueError:  # not the main thread
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class UserError(click.ClickException):
    """Something that the user can put right."""

    exit_code = BAD_INPUT

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message, and nothing else."""
        message = self.format_message()
        gap = "" if message.startswith("\n") else " "
        click.echo(f"error:{gap}{message}", file=file, err=file is None)


def user_errors() -> tuple[type[BaseException], ...]:
    """Return the types of error that are shown without a traceback."""
    found: list[type[BaseException]] = [OSError]
    for module, name in USER_ERRORS:
        loaded = sys.modules.get(module)
        if loaded is not None and hasattr(loaded, name):
            found.append(getattr(loaded, name))
    return tuple(found)


def _told(error: Exception) -> str:
    """Return the text of an error; of one of the system without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


class Commands(click.Group):
    """A group that turns errors into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            with ended_by_signals():
                return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read our output has gone, and what is left of it may not fail at exit either.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(nowhere, stream.fileno())
            ctx.exit(OUTPUT_CLOSED)
        except (KeyboardInterrupt, click.Abort) as error:
            if ctx.params.get("debug"):
                raise
            how = "terminated" if isinstance(error, Terminated) else "interrupted"
            click.echo(f"{how}; temporary files are removed", err=True)
            ctx.exit(error.exit_code if isinstance(error, Terminated) else INTERRUPTED)
        except MemoryError as error:
            if ctx.params.get("debug"):
                raise
            raise UserError(
                f"this host has not enough memory for it ({error or 'nothing is left'}); use a "
                "larger --scale, or a smaller device"
            ) from error
        except Exception as error:
            if ctx.params.get("debug") or not isinstance(error, user_errors()):
                raise
            raise UserError(_told(error)) from error


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"""
Exit codes: 0 fine; {WRONG_DATA} wrong data was delivered, or something leaked (or `bench
--strict` missed a bar, or a check of `run` failed); {BAD_INPUT} a bad option or file, or this host
cannot do it;
{TIMING_NOT_KEPT} `replay --wall`, `io --wall` or `worker` did not keep its timing (`demo` only
marks it);
{INTERRUPTED} interrupted; {TERMINATED} terminated (SIGTERM); {OUTPUT_CLOSED} whoever read the
output closed it (`| head`).

Start with: cxlbench demo
""",
)
@click.version_option(package.__version__, prog_name="cxlbench")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cxlbench(debug: bool) -> None:
    """Emulate KV-cache tiers on CXL memory: a test bench without the hardware.

    Every command has --help with an example, and --json, which prints one JSON document and nothing
    else on standard output (messages and progress go to standard error).
    """
    # A device or policy of the user's own (module:object) may lie here; last, so it hides nothing.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
