"""Values and pure functions that control plane and workers share: program, job, profile, costs, reasons, versions.

All that `service` may import of `worker`. No torch, no Ray; imports no other package of `worker`.
"""
