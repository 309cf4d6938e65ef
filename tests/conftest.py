"""Settings for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No deadline: a loaded machine isn't a failure. Same examples in every run.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _scratch_memory_is_nan() -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN, so that a value never written shows."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(autouse=True)
def _random_state_is_restored() -> Iterator[None]:
    state = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(state)
