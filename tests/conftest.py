from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Ranks, and the server that they are forked from, import by name what a test hands them: a body of
# styles/test_linear.py from styles.test_linear, what tests share from support.
_here = os.path.dirname(__file__)
_root = os.path.dirname(_here)
_examples = os.path.join(_root, "tutorials")
_paths = [_here, _root, os.environ.get("PYTHONPATH", ""), _examples]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _paths if path)
sys.path[:0] = [_here]
sys.path.append(_examples)
pytest.register_assert_rewrite("support")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="also run the slow, thorough tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skipped = {} if config.getoption("--deep") else {"deep": "slow: run with --deep"}
    if os.environ.get("TP2D_TRANSPORT"):
        skipped["gloo"] = "about gloo's transport"
    for item in items:
        for mark in skipped.keys() & item.keywords:
            item.add_marker(pytest.mark.skip(reason=skipped[mark]))


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    # Not of all modules: process groups, each with threads that poll, gather in the ranks.
    yield
    # Later, as it can be imported only from the paths above.
    from support import world

    world.close()
