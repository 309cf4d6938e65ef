"""Loads the native extension, which registers ``torch.ops.oper``."""

from __future__ import annotations

from pathlib import Path

import torch

from torchrec_oper.errors import KernelLoadError

LIBRARY = Path(__file__).resolve().parent.parent / "_kernels.so"

REBUILD = (
    "build it with `make build` in a checkout, or"
    " `pip install --no-build-isolation --no-deps --force-reinstall .`"
    " with the PyTorch that you run"
)


def load_kernels(library: Path = LIBRARY) -> None:
    """Load the native extension into this process; a second call does nothing.

    Raises:
        KernelLoadError: the file is missing, or PyTorch can't load it.
    """
    if not library.is_file():
        raise KernelLoadError(f"the native extension {library} is missing; {REBUILD}")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise KernelLoadError(
            f"PyTorch {torch.__version__} can't load the native extension {library}:"
            f" {error.__cause__ or error}; it was built for another PyTorch or machine; {REBUILD}"
        ) from error
