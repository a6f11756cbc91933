"""Values that users and the service exchange: JobSpec and its sections, states, principals and roles.

Imports nothing of service: no database, no HTTP, no Ray, no torch.
"""
