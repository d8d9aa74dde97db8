"""The errors a user can act on, apart from types.py so that the command line starts without torch.

Each is one line that names the thing and the remedy; ``exit_code`` is what the process ends with.
"""


class SolrlError(Exception):
    """A mistake or failure the user can act on: one line that names the thing and the remedy. Exit code 1."""

    exit_code = 1


class UsageError(SolrlError):
    """A setting or command that cannot work; raised before any model loads. Exit code 2."""

    exit_code = 2


class RewardFailed(SolrlError):
    """The reward raised, answered with something that is no score, or judged no image of an evaluation.

    The steps before are saved. Exit code 1.
    """


class Interrupted(SolrlError):
    """The run was asked to stop by a signal; everything is saved. Exit code 3."""

    exit_code = 3
