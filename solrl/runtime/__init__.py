"""The resource-shiftable runtime: jobs, roles and parameters; it knows nothing of diffusion.

PivotRL (arXiv 2610.16866). The pure parts, without torch, clock or device: roles, throughput, migration, scheduler,
planner and transfer decide; workload, progress, strategies and simulator play whole runs; advisor picks a mode.
With torch: arena is shared memory of one node, in it store keeps parameters (entries) and blobs what travels; network,
and transports for parameters, are the ways between machines, replication has a store on several; layouts converts;
mailbox, context, worker, controller and gang are the processes that take up roles and do jobs.
"""
