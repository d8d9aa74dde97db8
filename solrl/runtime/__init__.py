"""The resource-shiftable runtime: jobs, roles and parameters; it knows nothing of diffusion.

PivotRL (arXiv 2610.16866). Pure parts, without torch, clock or device: roles, throughput, migration, scheduler,
planner, workload, simulator, advisor.
"""
