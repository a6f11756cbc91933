"""Renders plans as JSON, CSV, tables, Chrome traces, SVG and text; `render.render` is the entry point.
Reads plans and specs and decides nothing. Pure: returns text, writes no file.
"""
