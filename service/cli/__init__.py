"""The `slotline` command line: one module a family of commands, assembled in main.

Imports service.client and service.spec; only serve and admin touch the store, only plan and local the scheduler
(inside functions, as it is slow to import). Holds no rules of the control plane.
"""
