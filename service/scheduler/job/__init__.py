"""From measured layers, links and memory to a job's plan: cut, placement, microbatches, reshardings and gradient
reduces.
May import the rest of the scheduler and worker.contract; knows no database, no HTTP and no Ray. Pure.
"""
