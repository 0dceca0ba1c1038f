"""The report as one HTML file that needs nothing else: no network, no other file, no library."""

from kvplus_eval.html.page import render_page, write_page

__all__ = ["render_page", "write_page"]
