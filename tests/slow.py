"""Mark parameters of tests as slow: `make test` leaves them to `make test-slow` and CI."""

import pytest


def slow_except(fast, cases):
    """Mark all cases as slow but those at the indices `fast`; a tuple has several arguments."""
    marked = []
    for index, case in enumerate(cases):
        arguments = case if isinstance(case, tuple) else (case,)
        marks = () if index in fast else pytest.mark.slow
        marked.append(pytest.param(*arguments, marks=marks))
    return marked
