"""The Ray actor of one accelerator, and its states: placed, prepared (data, loss and model), loaded (it trains).

May import machine, benchmark, checks, engine, checkpoint, data, parallel, model, transport and contract.
Must not know the driver, the control plane or (but for functions that ask for an address) Ray.
"""
