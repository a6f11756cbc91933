"""Rules of jobs and the values of the API's answers: submission, changes, saved plans, artifacts, logs, explanations.

Knows the store and the orchestrator's public calls. Must not import service.api, nor a web framework: routers translate
HTTP, and call one function here.
"""
