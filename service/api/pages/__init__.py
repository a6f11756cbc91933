"""The web pages: a list of jobs and a page for each job, drawn by the page's own script.

They read the same JSON API as everybody else; they must not know tables or Ray.
"""

from service.api.pages import data
from service.api.pages.router import router

router.include_router(data.router)

__all__ = ["router"]
