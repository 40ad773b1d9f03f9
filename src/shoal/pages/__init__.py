"""HTML pages of graphs, plans and runs, each a file of its own that needs no network."""

from shoal.pages.plans import graph_page, plan_page
from shoal.pages.run_pages import report_page, watch_page
from shoal.pages.run_view import RunView

__all__ = ["RunView", "graph_page", "plan_page", "report_page", "watch_page"]
