"""Settings of the control plane (SLOTLINE_*), parsed and checked once.

May import service.spec; must not know the store, the API or Ray.
"""
