"""Which tests `make nightly` alone has: those marked `long`, and all rows of a table that `long_but` does not name.

`@pytest.mark.long_but("everstep-run")` leaves one row in `make test`, the one whose id is `everstep-run`: rows of one
table rest on the same mechanism, so one of them shows at each commit that it is broken. On a module or a class it
stands for each table there.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

ROWS_SHOWN = 20


class Long:
    """A plugin of pytest's."""

    @pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        tables: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker("long_but") is not None:
                tables[item.nodeid.partition("[")[0]].append(item)
        whole = not any("::" in argument for argument in config.args)  # else tests are named one by one
        for name, table in tables.items():
            mark = table[0].get_closest_marker("long_but")
            assert mark is not None
            rows = [_row(item) for item in table]
            unknown = sorted(set(mark.args) - set(rows))
            if whole and (unknown or not mark.args):
                raise pytest.UsageError(
                    f"{name}: long_but({', '.join(map(repr, mark.args))}) has to name rows of it, and one at least; "
                    f"its {len(rows)} rows begin with {rows[:ROWS_SHOWN]}"
                )
            for item, row in zip(table, rows, strict=True):
                if row not in mark.args:
                    item.add_marker(pytest.mark.long)


def _row(item: pytest.Item) -> str:
    """The id of its parameters; "" where it has none."""
    called = getattr(item, "callspec", None)
    return str(called.id) if called is not None else ""
