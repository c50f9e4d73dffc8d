"""The menu of a problem whose keys lie in pages of so many rows, which not every pipeline can load."""

from __future__ import annotations

from flashgen.errors import PlanError, shown
from flashgen.lang.ranges import MAX_LENGTH
from flashgen.planning import planner
from flashgen.planning.plan import Fallback
from flashgen.planning.planner import Menu
from flashgen.planning.request import KernelRequest

#: Rows of a page unless a problem says it; pages of a multiple of them suit every pipeline.
PAGE_ROWS = 16


def rows_of_pages(layout_name: str, paged: bool, page_size: int | None) -> int | None:
    """Rows of a page of a layout, None where it has no pages.  Raises PlanError for what is no number of rows, and for
    one where there are no pages."""
    if not paged and page_size is not None:
        raise PlanError(
            f"page_size is of keys that lie in pages, and the layout is {layout_name}\n"
            "  nearest: layout paged, or no page_size"
        )
    if page_size is not None and not 0 < page_size < MAX_LENGTH:
        raise PlanError(f"page_size is {shown(page_size)}: pages have 1 to 2^24 - 1 rows\n  nearest: {PAGE_ROWS}")
    return (page_size or PAGE_ROWS) if paged else None


def menu_of_pages(request: KernelRequest, page_size: int | None) -> Menu:
    """`planner.menu_of` a request, of a pipeline that loads pages of so many rows; None: there are no pages.

    Raises PlanError as that does, and where the pipeline that is fixed loads no such pages.
    """
    menu = planner.menu_of(request)
    serving = planner.pipeline_of(menu.plans[0])
    limit = None if page_size is None else serving.cannot_page(page_size)
    if page_size is None or limit is None:
        return menu
    reason = f"{serving.COPIES} cannot load pages: {limit}"
    nearest = f"pages of {max(PAGE_ROWS, PAGE_ROWS * round(page_size / PAGE_ROWS))} rows"
    able = next((other for other in planner.others(serving, request) if other.cannot_page(page_size) is None), None)
    if able is None or request.fixed.pipeline is not None:
        or_pipeline = "" if able is None else f", or pipeline {able.NAME}"
        raise PlanError(f"pipeline {serving.NAME}: {reason}\n  nearest: {nearest}{or_pipeline}")
    passed = Fallback(pipeline=serving.NAME, reason=f"its {reason}", nearest=nearest)
    return planner.menu_of(request.fixing(pipeline=able.NAME)).instead_of(*menu.fallbacks, passed)
