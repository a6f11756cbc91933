"""The Ray actor of one accelerator: calls, model host, batch feed, saver, optimizer, loss, device, telemetry.

May import benchmark, checks, engine, checkpoint, data, parallel, model, transport and contract.
Must not know the driver, the control plane or (but for functions that ask for an address) Ray.
"""
