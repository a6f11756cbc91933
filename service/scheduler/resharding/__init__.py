"""Resharding: moves a tensor from its layout on one mesh to another layout on another mesh (DESIGN section 12).
`resharding.plan_resharding` is the entry point. Pure; knows no job and no pipeline schedule, `worker` runs its
JSON.
"""
