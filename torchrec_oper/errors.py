"""The errors a user can meet, by what is at fault."""


class OperError(Exception):
    """Base of every error that torchrec-oper raises on purpose."""


class VersionError(OperError, ImportError):
    """PyTorch, TorchRec and FBGEMM are missing or don't go together."""


class KernelLoadError(OperError, ImportError):
    """The native extension is missing or can't be loaded."""


class ArchiveError(OperError, ValueError):
    """A file is truncated, damaged, or not the kind of file that was asked for."""


class LogFormatError(OperError, ValueError):
    """A click log holds something that its format doesn't allow."""


class ProfileError(OperError, ValueError):
    """An access profile or its input doesn't fit the tables."""


class BatchError(OperError, ValueError):
    """A batch doesn't fit the tables."""


class PlanError(OperError, ValueError):
    """A plan can't be made, or doesn't fit the model or the process group."""


class UnusedConstraintWarning(UserWarning):
    """Constraints that TorchRec knows and this planner doesn't use."""
