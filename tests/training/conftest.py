"""Slides and texts that several tests of training read, and none writes to."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.short_runs import write_mixed_cohort


@pytest.fixture(scope="session")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six slides of several sizes, in three formats, of two magnifications; every second one has a lesion."""
    return write_mixed_cohort(tmp_path_factory.mktemp("cohort"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, random = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = ["if", "else", "né", "for", "->", "return", "\n", "  ", "x"]
    for i in range(9):
        (root / f"{i}.txt").write_text(" ".join(random.choice(words, 40)), encoding="utf-8")
    return root
