"""The mark of the result line of a proof. No torch."""

PROOF_MARK = "SLOTLINE_PROOF "
"""`python -m worker.verify` answers in a line of its output with this mark."""
