import os
import signal
from pathlib import Path

# Threads that wait asleep leave the cores to the other jobs of a busy machine. Before PyTorch is
# imported, because its OpenMP reads this once.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

# A process that a shell starts in the background ignores SIGINT, and tests of Ctrl-C would wait for
# ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take longest start first, so that none is left over when the others have ended.
LONGEST = ["machines", "explorer_page", "decoding", "training", "cli", "site", "export"]


def pytest_collection_modifyitems(items):
    """Sort tests by file, the longest files first."""
    order = {f"test_{name}.py": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture
def set_num_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def empty_is_nan():
    """What torch.empty returns is NaN, so that none of it goes unwritten unseen."""
    torch.use_deterministic_algorithms(True)  # the switch that does this, among other things
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def corpora():
    """The folder of the real corpora, which the project does not carry."""
    folder = Path(__file__).parent.parent.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"there are no corpora in {folder}")
    return folder
