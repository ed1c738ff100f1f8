"""Every exception that hpctrain raises on purpose.

::

    HpctrainError
    ├── UserError                 exit 2: what the user asked for cannot be done as asked
    │   ├── SpecError             an option, argument or path of a job is wrong
    │   ├── EnvironmentMismatch   variables of the environment contradict each other
    │   └── RunNotFound           no run of that id or folder
    ├── SchedulerError            exit 3: the scheduler refused, or cannot be reached
    ├── RunFailed                 exit 4: the run ended without success
    ├── WaitTimeout               exit 1: what was waited for has not come yet
    ├── MeetingFailed             exit 1: the ranks of a job did not find each other
    └── CheckpointError           exit 1: a checkpoint could not be written or read
        └── BrokenCheckpoint      a part of it is missing or changed

A message says what is wrong with both values, where each came from, and what to do next.
The command line turns an error into one line on stderr and `exit_code`; nobody else translates.
"""

from __future__ import annotations

from typing import ClassVar

#: Exit code of a rank whose state is saved and who asks to be continued.
EXIT_CONTINUE = 75


class HpctrainError(Exception):
    """Base of all errors that hpctrain raises on purpose."""

    exit_code: ClassVar[int] = 1


class UserError(HpctrainError, ValueError):
    """What the user asked for cannot be done as asked."""

    exit_code = 2


class SpecError(UserError):
    """An option, an argument or a path of a job is wrong."""


class EnvironmentMismatch(UserError):
    """Variables of the environment contradict each other, or lack a part."""


class RunNotFound(UserError):
    """There is no run of that id or folder."""


class SchedulerError(HpctrainError):
    """The scheduler refused a request, or cannot be reached."""

    exit_code = 3


class RunFailed(HpctrainError):
    """The run ended, and not with success."""

    exit_code = 4


class WaitTimeout(HpctrainError, TimeoutError):
    """What was waited for has not come within the time that was given."""


class MeetingFailed(HpctrainError):
    """The ranks of a job did not find each other."""


class CheckpointError(HpctrainError):
    """A checkpoint could not be written or read."""


class BrokenCheckpoint(CheckpointError):
    """A checkpoint is not what was written: a part is missing or changed."""
