"""HTML pages of graphs, plans and runs, each a file of its own that needs no network."""

from shoal.pages.plans import graph_page, plan_page

__all__ = ["graph_page", "plan_page"]
