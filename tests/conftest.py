from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="also run the slow, thorough tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--deep"):
        return
    for item in items:
        if "deep" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with --deep"))
