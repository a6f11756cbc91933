"""The web pages: a list of jobs and a page for each job, drawn by the page's own script.

They read the same JSON API as everybody else; they must not know tables or Ray.
"""
